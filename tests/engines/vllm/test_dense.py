"""The wheels' builder of dense MLA on random steps: off is vLLM's answer, on is the table's."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key, Measurement, Status, Table
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.vllm import backend
from nsa_tune.engines.vllm.backend import _check_measured
from nsa_tune.engines.vllm.dense import DensePrefill
from nsa_tune.engines.vllm.facts import facts_of
from nsa_tune.engines.vllm.prefill import ATTRIBUTE, around_build, steer
from nsa_tune.engines.vllm.priced import LAUNCH_US, priced_dense
from tests.engines.vllm.engine import (
    UTILS,
    Lens,
    _executed,
    _Torch,
    config,
    random_lens,
    stand_in_modules,
    step_of,
)
from tests.engines.wheels import Wheel
from tests.reports.synthetic import H100

_FILE = "vllm/model_executor/layers/attention/mla_attention.py"
_FLASHATTN = "vllm/v1/attention/backends/mla/flashattn_mla.py"
_VARLEN = SimpleNamespace(VARLEN="varlen", SINGLE_ONLY="single", UNIFORM="uniform")


@dataclass
class _Prefill:
    query_lens_cpu: Any
    max_query_len: int = 0

    @classmethod
    def of(cls, **given: Any) -> _Prefill:
        return cls(given["query_lens_cpu"])


def _text(heads: int = 128) -> Any:
    return SimpleNamespace(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        num_hidden_layers=61, num_attention_heads=heads,
    )  # fmt: skip


def _kind(wheel: Wheel) -> type:
    """FlashAttention's builder with the wheel's own `build`, hooked as the plug-in does it."""
    names = {
        "__name__": "dataclasses", "torch": _Torch(), "PIN_MEMORY": False,
        "QueryLenSupport": _VARLEN, "MLACommonPrefillMetadata": _Prefill.of,
        "build_mla_chunked_context_metadata": lambda **given: None,
    }  # fmt: skip
    split = wheel.definition(UTILS, "split_decodes_and_prefills")
    build = wheel.definition(_FILE, "MLACommonMetadataBuilder.build")
    found = _executed([split, build], names)
    return type("Builder", (), {"build": found["build"], "query_len_support": _VARLEN.VARLEN})


def _builder(wheel: Wheel, *, heads: int = 128, **changes: Any) -> Any:
    given = config(text=_text(heads), cache_dtype="auto", **changes)
    builder: Any = _kind(wheel)()
    mha = SimpleNamespace(prepare_metadata=lambda prefill: None, get_name=lambda: "FLASH_ATTN")
    given.model_config.get_head_size = lambda: 576
    given.attention_config.trtllm_ragged_backend = ""
    attributes: dict[str, Any] = {
        "vllm_config": given, "model_config": given.model_config, "device": torch.device("cpu"),
        "layer_names": [f"model.layers.{i}.self_attn.attn" for i in range(61)],
        "reorder_batch_threshold": 512, "use_pcp": False, "dcp_world_size": 1, "page_size": 64,
        "chunked_prefill_workspace": None, "chunked_prefill_workspace_size": 65536,
        "dcp_local_block_size": 1, "dcp_virtual_block_size": 1, "dcp_manager": None,
        "q_data_type": torch.bfloat16, "_prefill_backend": mha,
        "_build_decode": lambda **decode: SimpleNamespace(**decode),
        "metadata_cls": lambda **metadata: SimpleNamespace(**metadata),
    }  # fmt: skip
    for name, value in attributes.items():
        setattr(builder, name, value)
    return builder


@cache
def _table() -> Dispatcher:
    """Absorbed attention takes a microsecond a token, MHA 170, whatever the prefix."""
    setting = Setting(profile_of("deepseek-v3"), 16, KVLayout.BF16, H100)
    rows = []
    for prefix in (0, 512, 8192, 65536):
        for new in (1, 16, 64, 128, 256, 512, 1024, 4096):
            batch = str(Batch.extend([prefix], [new]))
            whole = "mha/sgl_fa3_merged" if prefix else "mha/sgl_fa3"
            for arm, us in (("mla/fa3_paged", float(new)), (whole, 170.0 - LAUNCH_US)):
                rows.append(
                    Measurement("dense_prefill", batch, arm, Status.OK, us, us, us, 8, 0.001)
                )
            # vLLM never runs this one, however fast it is.
            rows.append(
                Measurement("dense_prefill", batch, "mha/fa3", Status.OK, 0.1, 0.1, 0.1, 8, 0.001)
            )
    policy = Policy.fit(POINTS["dense_prefill"], setting, rows)
    key = Key(H100.name, "", (), "deepseek-v3", 16, "bf16", "cuda-graph/3")
    table = Table(key, H100, tuple(rows), "", "2026-11-24T00:00:00+00:00")
    return Dispatcher(setting, [policy], source="made up", table=table, baseline=VLLM_0_33_0)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_in_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def _built(builder: Any, lens: Lens, **changes: Any) -> tuple[int, list[int]]:
    """How many requests are decodes, and the new tokens of the prefills."""

    def original(builder: Any, prefix: int, batch: Any, fast: bool) -> Any:
        return type(builder).build(builder, prefix, batch, fast)

    metadata = around_build(original, builder, 0, step_of(lens, **changes))
    prefill = metadata.prefill
    return metadata.num_decodes, [] if prefill is None else prefill.query_lens_cpu.tolist()


def _steered(wheel: Wheel) -> Any:
    builder = _builder(wheel)
    facts = facts_of(builder)
    table = priced_dense(_table(), facts.layers)
    steer(builder, DensePrefill(table, facts))
    return builder


def test_short_extends_are_expanded_where_the_table_says_so(wheel: Wheel) -> None:
    builder = _steered(wheel)

    assert _built(builder, [(8192, 16)]) == (1, [])
    assert _built(builder, [(8192, 400)]) == (0, [400])
    # Decodes stay decodes, and what vLLM expands by itself is not asked about.
    assert _built(builder, [(700, 1), (8192, 400), (0, 2000)]) == (1, [400, 2000])
    assert _built(builder, [(700, 1), (8192, 16), (0, 2000)]) == (2, [2000])
    assert _built(builder, [(700, 1), (0, 2000)]) == (1, [2000])


def test_the_first_step_finds_the_table_ready() -> None:
    """What corrects its times is computed once, for longer than a step may wait."""
    table = priced_dense(_table(), 60)
    (residuals,) = table.policies["dense_prefill"].fitted.residuals.values()
    assert "_weights" not in vars(residuals)

    DensePrefill(table, SimpleNamespace(decode_tokens=1))  # type: ignore[arg-type]
    assert "_weights" in vars(residuals)


def test_over_a_prefix_only_mha_in_parts_counts() -> None:
    """Absorbed 144 us a layer, MHA 174 (in one call 127); 1012, 737; 7146, 4974."""
    shipped = Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3", heads=16, kv_dtype="bf16", baseline=VLLM_0_33_0
    )
    path = priced_dense(shipped, 61).chooser("prefill_path")
    asked = ([4096], [512]), ([4096] * 8, [512] * 8), ([32768] * 8, [512] * 8)
    assert [path(Batch.extend(*one).sums) for one in asked] == ["mla", "mha", "mha"]


def test_on_random_steps_only_short_extends_change_sides(wheel: Wheel) -> None:
    plain, steered, changed = _builder(wheel), _steered(wheel), 0
    random = Random(40)
    for _ in range(500):
        lens = random_lens(random)
        (decodes, _), (fewer, expanded) = _built(plain, lens), _built(steered, lens)

        assert fewer <= decodes, lens
        assert [new for _, new in lens[fewer:]] == expanded
        if fewer < decodes:
            changed += 1
            assert all(new == 1 for _, new in lens[:fewer])
        assert steered.reorder_batch_threshold == 512
    assert 50 < changed < 450


def test_steps_without_a_prefill_and_without_lengths_are_vllms_own(wheel: Wheel) -> None:
    builder = _steered(wheel)

    assert _built(builder, [(700, 1), (9, 1)]) == (2, [])
    assert _built(builder, [(8192, 400)], causal=None) == (1, [])
    builder.reorder_batch_threshold = 1
    assert _built(builder, [(8192, 16)]) == (0, [16])


def test_kimi_k2_is_known_by_its_heads(wheel: Wheel) -> None:
    assert facts_of(_builder(wheel)).profile.name == "deepseek-v3"
    assert facts_of(_builder(wheel, heads=64)).profile.name == "kimi-k2"


def test_a_table_without_the_engines_kernels_steers_nothing() -> None:
    facts: Any = SimpleNamespace(profile=profile_of("deepseek-v3"))
    _check_measured(_table(), facts)
    gaps = SimpleNamespace(spread=lambda arm: inf if arm == "mla/fa3_paged" else 0.1)
    given: Any = SimpleNamespace(policies={"dense_prefill": gaps})
    with pytest.raises(LeftAlone, match="no times of mla/fa3_paged"):
        _check_measured(given, facts)


def test_an_engine_is_steered_only_where_that_is_asked_for(
    newest: Wheel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "opened", lambda *given: _table())
    monkeypatch.setattr(backend, "agreed", lambda decides: True)
    builder = _builder(newest)

    backend.attach(builder)
    assert ATTRIBUTE not in vars(builder)
    assert "NSA_TUNE_DENSE_MLA=1" in caplog.text

    monkeypatch.setenv("NSA_TUNE_DENSE_MLA", "1")
    backend.attach(builder)
    assert isinstance(vars(builder)[ATTRIBUTE], DensePrefill)


def test_graphs_are_captured_through_the_base_class(wheel: Wheel) -> None:
    whole = ast.unparse(wheel.definition(_FILE, "MLACommonMetadataBuilder"))

    assert "assert m.max_query_len <= self.reorder_batch_threshold" in whole
    builder = ast.unparse(wheel.definition(_FLASHATTN, "FlashAttnMLAMetadataBuilder"))
    assert "def build(" not in builder
