"""What happens to a builder that the engine has just made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune import Batch
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.engines import dispatchers
from nsa_tune.engines.decision_log import process_log, read_decisions
from nsa_tune.engines.vllm import EDGE
from nsa_tune.engines.vllm.backend import around_init, attach
from nsa_tune.engines.vllm.prefill import ATTRIBUTE, Prefill
from tests.engines.sglang.tables import GPU, table_file
from tests.engines.vllm.engine import (
    LAYERS,
    Engine,
    builder_of,
    config,
    stand_in_modules,
    step_of,
)
from tests.engines.wheels import Wheel

Changes = dict[str, Any]


@pytest.fixture
def engine(newest: Wheel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(detect, "local_device_name", lambda: GPU)
    _modules(monkeypatch)
    for cached in (dispatchers._dispatcher, process_log):
        cached.cache_clear()
    return Engine(newest)


def _modules(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    for name, module in stand_in_modules(**names).items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", str(table_file(tmp_path)))


def _builder(engine: Engine, **changes: Any) -> Any:
    return builder_of(engine.flashmla(hooked=True), config(heads=128, **changes))


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.name == "vllm.nsa_tune"]


@pytest.mark.usefixtures("measured")
def test_a_measured_builder_is_steered_and_says_by_what(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    builder = _builder(engine)
    for _ in range(2):
        attach(builder, LAYERS)

    assert ATTRIBUTE in builder.__dict__
    (line,) = _said(caplog)
    assert line.startswith(
        "deepseek-v3.2, 128 local heads, fp8 KV: prefill by MHA or MLA (flashmla_kv, "
        "flashmla_sparse) by "
    )
    assert "table.tsv" in line


@pytest.mark.usefixtures("measured")
def test_the_constructors_hook_runs_it_first(engine: Engine) -> None:
    builder = _builder(engine)
    made: list[Any] = []
    around_init(lambda *rest, **named: made.append((rest, named)), builder, 1, LAYERS, device=2)

    assert made == [((builder, 1, LAYERS), {"device": 2})]
    assert ATTRIBUTE in builder.__dict__


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__use_ubatching": True}, "microbatches"),
        ({"attention_config__hisparse_config": object()}, "HiSparse"),
        (
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "adaptive verification",
        ),
        ({"speculative_config": SimpleNamespace(parallel_drafting=True)}, "parallel drafting"),
        ({"cache_dtype": "nvfp4_ds_mla"}, "a KV cache of nvfp4_ds_mla"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
@pytest.mark.usefixtures("measured")
def test_what_is_not_measured_is_left_alone(
    engine: Engine, changes: Changes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    builder = _builder(engine, **changes)
    attach(builder, LAYERS)

    assert ATTRIBUTE not in builder.__dict__
    assert _said(caplog) == [f"vLLM decides by itself: nothing is measured for {what}"]


@pytest.mark.usefixtures("measured")
def test_batch_invariant_mode_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _modules(monkeypatch, invariant=True)
    builder = _builder(engine)
    attach(builder, LAYERS)

    assert ATTRIBUTE not in builder.__dict__
    assert "batch-invariant mode" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_draft_models_builder_is_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    builder = _builder(engine)
    attach(builder, ["model.layers.61.self_attn.attn"])

    assert ATTRIBUTE not in builder.__dict__
    assert "the layers of a draft model" in caplog.text


@pytest.mark.usefixtures("measured")
def test_an_unknown_model_is_named_by_its_shape(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    builder = _builder(engine)
    builder.vllm_config.model_config.hf_text_config.index_topk = 512
    attach(builder, LAYERS)

    assert "no model profile has kv_lora_rank 512" in caplog.text


def test_without_a_table_nothing_is_steered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ())
    builder = _builder(engine)
    attach(builder, LAYERS)

    assert ATTRIBUTE not in builder.__dict__


@pytest.mark.usefixtures("measured")
def test_a_table_of_other_libraries_answers_within_the_limits_of_vllms(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured with a FlashMLA of its own, and vLLM brings another."""
    monkeypatch.setattr(nvml, "gpu_names", lambda: (GPU,))
    monkeypatch.setattr(detect, "driver_version", lambda: "1.0")
    monkeypatch.setattr(detect, "library_versions", lambda: (("vllm", "0.33.0"),))
    builder = _builder(engine)
    attach(builder, LAYERS)
    table = dispatchers.opened(EDGE, VLLM_0_33_0, "deepseek-v3.2", 128, "fp8", 61)

    assert ATTRIBUTE in builder.__dict__
    assert table is not None
    survey = table.policies["prefill"].survey(Batch.extend([30000], [5000]))
    assert {"mla/flashmla_kv", "mla/flashmla_sparse"} <= survey.latencies.keys()


class _Store:
    """A store in which the other rank says the same as this one, or something else."""

    def __init__(self, other: Callable[[str], str]) -> None:
        self._other = other
        self._texts: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._texts[key] = value
        self._texts[key.removesuffix("0") + "1"] = self._other(value)

    def get(self, key: str) -> bytes:
        return self._texts[key].encode()

    def check(self, keys: list[str]) -> bool:
        return self._texts.keys() >= set(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        return self._texts.setdefault(key, desired).encode()


def _group(other: Callable[[str], str]) -> Any:
    store = _Store(other)
    cpu_group = SimpleNamespace(get_group_store=lambda: store)
    return SimpleNamespace(world_size=2, rank_in_group=0, cpu_group=cpu_group)


@pytest.mark.parametrize(
    ("other", "steered"), [(lambda text: text, True), (lambda text: f"not {text}", False)],
    ids=["alike", "different"],
)  # fmt: skip
@pytest.mark.usefixtures("measured")
def test_ranks_decide_alike_or_not_at_all(
    engine: Engine,
    other: Callable[[str], str],
    steered: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _modules(monkeypatch, group=_group(other))
    builder = _builder(engine)
    attach(builder, LAYERS)

    assert (ATTRIBUTE in builder.__dict__) is steered
    lines = [one for one in _said(caplog) if "ranks" in one]
    assert len(lines) == (not steered)


def test_a_rank_without_a_table_tells_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    def hear(text: str) -> str:
        said.append(text)
        return text

    monkeypatch.setattr(nvml, "gpu_names", lambda: ())
    _modules(monkeypatch, group=_group(hear))
    attach(_builder(engine), LAYERS)

    assert said[0] == "no table"
    assert "tables differ" not in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_rank_that_cannot_steer_tells_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would go on alone, had it agreed before it failed."""
    said: list[str] = []

    def hear(text: str) -> str:
        said.append(text)
        return "what another rank decides by"

    _modules(monkeypatch, group=_group(hear))
    builder = _builder(engine)
    monkeypatch.setattr(Prefill, "__init__", lambda *_: 1 / 0)
    attach(builder, LAYERS)

    assert said[0] == "no table"
    assert ATTRIBUTE not in builder.__dict__
    assert "tables differ" in caplog.text


@pytest.mark.usefixtures("measured")
def test_decisions_are_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    monkeypatch.setenv("NSA_TUNE_LOG", str(path))
    process_log.cache_clear()
    builder = _builder(engine)
    attach(builder, LAYERS)
    builder.build(0, step_of([(900, 1), (0, 200)]))
    (decision,) = read_decisions(path)

    assert str(decision.batch) == "extend:0+200"
    assert decision.heads == 128
    assert decision.own == {"prefill_path": "mha", "sparse_prefill": "flashmla_sparse"}
    assert decision.taken["prefill_path"] in ("mha", "mla")
