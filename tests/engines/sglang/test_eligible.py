"""Each reason for which a part of an engine is left to SGLang, one at a time."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang import eligible as module
from nsa_tune.engines.sglang.eligible import (
    LONGEST_DENSE,
    PLAN_STREAM,
    ROWS,
    Engine,
    as_markdown,
    why_not,
)
from nsa_tune.engines.sglang.releases import INDEXER
from nsa_tune.engines.sglang.switch import SAME_NUMERICS, SWITCHES, Part
from tests.engines.sglang.pass_mode.fakes import Speculation
from tests.engines.sglang.wheels import Wheel
from tests.engines.site import REPOSITORY

TABLE, PASSES, DENSE, DENSE_MLA = Part.TABLE, Part.PASSES, Part.DENSE, Part.DENSE_MLA
SPARSE, DECODE_GRAPHS, TOPK = Part.SPARSE, Part.DECODE_GRAPHS, Part.TOPK
COPIES, DECODE = Part.COPIES, Part.DECODE
EAGLE: dict[str, Any] = {"spec_algorithm": Speculation.EAGLE}
_ON_RUNNER = {
    "is_generation", "spec_algorithm", "decode_cuda_graph_runner", "model_config", "is_draft_worker"
}  # fmt: skip


def _hook(method: Any, *given: Any) -> Any:
    return method(*given)


def _hooked(name: str) -> Any:
    """A hook as the plug-in's own, around a method."""

    def method(self: object) -> None:
        """SGLang's."""

    _hook.__module__ = "nsa_tune.engines.sglang.made_up"
    method.__name__ = name
    return wrapped(method, _hook)


class BreakableCudaGraphBackend:
    """Bears SGLang's name."""

    replay = _hooked("replay")


class _Graphs:
    capture_num_tokens = (64,)
    _prepare_forward_metadata_for_replay = _hooked("prepare")

    def __init__(self) -> None:
        self.backend: Any = BreakableCudaGraphBackend()


class _Topk:
    topk_transform = _hooked("topk_transform")

    def is_sgl_kernel(self) -> bool:
        return True


class _Backend:
    set_dsa_prefill_impl = _hooked("set_dsa_prefill_impl")
    forward_extend = _hooked("forward_extend")
    _forward_flashmla_sparse = _hooked("_forward_flashmla_sparse")
    _forward_fa3 = _hooked("_forward_fa3")
    num_splits, dsa_index_topk, num_q_heads, topk = 0, 2048, 16, 0
    hisparse_coordinator = None
    dsa_kv_cache_store_fp8 = False
    use_fused_topk = True
    dsa_decode_impl = "fa3"

    def __init__(self, **changes: Any) -> None:
        self.dsa_topk_backend: Any = _Topk()
        vars(self).update(changes)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switches, a Hopper GPU, and hooks on everything."""
    for name in (
        *SWITCHES.values(),
        SAME_NUMERICS,
        LONGEST_DENSE,
        PLAN_STREAM,
        "SGLANG_DSA_TOPK_BROADCAST",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "parallel", lambda: _parallel())
    indexer = ModuleType("dsa_indexer")
    vars(indexer)["Indexer"] = type("Indexer", (), {"_forward_cuda_k_only": _hooked("k_only")})
    monkeypatch.setitem(sys.modules, INDEXER, indexer)


def _parallel(**changes: int) -> Any:
    return SimpleNamespace(**({"attn_cp_size": 1, "attn_dp_size": 1} | changes))


def _engine(backend: Any = None, graphs: Any = None, **changes: Any) -> Engine:
    arguments = {"pp_size": 1, "tp_size": 1, "moe_a2a_backend": "none"}
    arguments |= {name: changes.pop(name) for name in list(changes) if name not in _ON_RUNNER}
    on_runner = {
        "is_generation": True, "spec_algorithm": Speculation.NONE, "is_draft_worker": False,
        "decode_cuda_graph_runner": SimpleNamespace(capture_bs=[8]),
        "model_config": SimpleNamespace(hf_config=SimpleNamespace()), **changes,
    }  # fmt: skip
    runner = SimpleNamespace(server_args=SimpleNamespace(**arguments), **on_runner)
    return Engine(runner, backend or _Backend(), graphs or _Graphs())


def _off(engine: Engine) -> set[Part]:
    """The parts that are left to SGLang."""
    return {part for part in Part if why_not(part, engine) is not None}


def test_nothing_of_a_plain_engine_is_left_out() -> None:
    # Over a bf16 pool with padded heads even the copies have something to do.
    assert _off(_engine()) == set()
    assert _off(_engine(_Backend(topk=1), tp_size=8, **EAGLE)) == set()


def _config(**changes: Any) -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(**changes))


_OTHER = "another attention than DSA and dense MLA by FlashAttention-3"
_ALL = {TABLE, PASSES, TOPK, COPIES, DECODE}
_INDEX = {TABLE, PASSES, TOPK}


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({"pp_size": 2}, {TABLE, PASSES}),
        ({"model_config": _config(learnable_sink=True)}, {TABLE, PASSES}),
        (
            {"is_draft_worker": True, "model_config": _config(index_share_for_mtp_iteration=True)},
            {TABLE, PASSES},
        ),
        ({"enable_dp_attention": True}, {TABLE, PASSES}),
        ({"is_generation": False}, {PASSES}),
        ({"moe_a2a_backend": "deepep"}, {PASSES}),
        ({"moe_a2a_backend": None}, set()),
        ({"enable_lora": True}, {PASSES}),
        ({"enable_hierarchical_cache": True}, {PASSES}),
        ({"enable_two_batch_overlap": True}, {PASSES}),
        ({"enable_unified_memory": True}, {PASSES}),
        ({"enable_pdmux": True}, {PASSES}),
        ({"offload_group_size": 4}, {PASSES}),
        ({"offload_group_size": -1}, set()),
        ({"startup_weight_load_mode": "overlap"}, {PASSES}),
        ({"startup_weight_load_mode": "sync"}, set()),
        ({"debug_cuda_graph": True}, {DENSE, SPARSE}),
        ({"enable_return_indexer_topk": True}, {TABLE, DENSE, SPARSE, DECODE_GRAPHS}),
        ({"spec_algorithm": Speculation.NGRAM}, {DECODE_GRAPHS}),
        ({**EAGLE, "speculative_adaptive": True}, {TABLE, DECODE_GRAPHS}),
        ({**EAGLE, "enable_multi_layer_eagle": True}, {DECODE_GRAPHS}),
        ({"enable_return_routed_experts": True}, {DECODE_GRAPHS}),
        ({"disable_cuda_graph_padding": True}, {DECODE_GRAPHS}),
        ({"decode_cuda_graph_runner": None}, {DECODE_GRAPHS}),
        # Ranks of one batch run what their proof at start has admitted, whatever the all-reduce.
        ({"tp_size": 2, "enable_torch_symm_mem": True, "enable_mscclpp": True}, set()),
    ],
)
def test_an_engines_arguments_leave_parts_out(changes: dict[str, Any], off: set[Part]) -> None:
    assert _off(_engine(**changes)) == off


def test_an_argument_counts_as_sglang_has_resolved_it(
    newest: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--lora-paths` alone: what was given is kept, and what follows from it is elsewhere."""
    overrides, names = ModuleType("overrides"), {"with_fallback": lambda kind, name, value: value}
    vars(overrides)["resolution_result"] = newest.compiled(
        "sglang/srt/arg_groups/overrides.py", "resolution_result", names
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    lora = [("check_lora_server_args", {"enable_lora": True})]
    alone = [("_handle_deprecated_dp_attention", {"enable_dp_attention": False})]

    assert _off(_engine(enable_lora=None, _resolved_overrides=lora)) == {PASSES}
    assert _off(_engine(enable_lora=None)) == set()
    assert _off(_engine(enable_dp_attention=True, _resolved_overrides=alone)) == {TABLE, PASSES}


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({"num_splits": 1}, _ALL),
        ({"hisparse_coordinator": object()}, _ALL),
        ({"_kv_shard_pool": object()}, _ALL - {DECODE}),
        ({"dcp_size": 2}, _ALL - {COPIES}),
        ({"dsa_index_kpool": 2}, _INDEX),
        ({"supports_mha_one_shot": False}, {DENSE}),
        ({"dsa_kv_cache_store_fp8": True}, {DENSE_MLA}),
        ({"use_fused_topk": False}, {TOPK, SPARSE}),
        ({"dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: False)}, {TOPK, SPARSE}),
        ({"num_q_heads": 64}, {COPIES}),
        ({"dsa_decode_impl": "flashmla_kv"}, {DECODE}),
    ],
)
def test_its_attention_leaves_parts_out(changes: dict[str, Any], off: set[Part]) -> None:
    assert _off(_engine(_Backend(**changes))) == off


def test_drafts_that_are_trees_are_no_rows() -> None:
    assert _off(_engine(_Backend(topk=4), **EAGLE)) == {DECODE_GRAPHS}


@pytest.mark.parametrize(
    ("ranks", "off"),
    [
        ({"attn_cp_size": 2}, _INDEX),
        ({"attn_dp_size": 2}, {TABLE, PASSES}),
        ({}, set()),
    ],
)
def test_its_ranks_leave_parts_out(
    ranks: dict[str, int], off: set[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "parallel", lambda: _parallel(**ranks))

    assert _off(_engine()) == off


@pytest.mark.parametrize(
    ("variable", "value", "off"),
    [
        *((name, "0", {part}) for part, name in SWITCHES.items()),
        *((name, value, {PASSES}) for name in [SWITCHES[PASSES]] for value in ("No", " OFF ")),
        # They are off-switches: what was asked for by 1 once is on by itself.
        *((name, value, set()) for name in SWITCHES.values() for value in ("1", "yes")),
        (SAME_NUMERICS, "1", {TABLE, DENSE, DENSE_MLA, DECODE}),
        (SAME_NUMERICS, "0", set()),
        ("SGLANG_DSA_TOPK_BROADCAST", "1", _INDEX),
        ("SGLANG_DSA_TOPK_BROADCAST", "0", set()),
        (PLAN_STREAM, "true", {DECODE_GRAPHS}),
        (LONGEST_DENSE, "2047", {DENSE}),
        (LONGEST_DENSE, "2048", set()),
        (LONGEST_DENSE, "0", {DENSE}),
    ],
)
def test_its_environment_leaves_parts_out(
    variable: str, value: str, off: set[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)

    assert _off(_engine()) == off


@pytest.mark.parametrize(
    ("cuda", "capability", "off"),
    [
        ("13.0", (10, 0), {DENSE, SPARSE, COPIES, DECODE}),
        ("13.0", (7, 5), {DENSE, SPARSE, COPIES, DECODE, TOPK}),
        # Of another maker: its numbers mean something else.
        (None, (9, 4), {DENSE, SPARSE, COPIES, DECODE, TOPK}),
    ],
)
def test_its_gpu_leaves_parts_out(
    cuda: str | None, capability: tuple[int, int], off: set[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    assert _off(_engine()) == off


def test_graphs_that_are_not_there_or_of_another_kind_leave_parts_out() -> None:
    other = _Graphs()
    other.backend = SimpleNamespace()

    assert why_not(PASSES, _engine(graphs=object())) == "no prefill CUDA graphs"
    assert "another kind" in (why_not(DENSE, _engine(graphs=other)) or "")


@pytest.mark.parametrize(
    ("owner", "name", "off"),
    [
        (_Topk, "topk_transform", {TOPK}),
        (_Backend, "_forward_flashmla_sparse", {COPIES}),
        (_Backend, "_forward_fa3", {DECODE}),
        (_Backend, "forward_extend", {DENSE_MLA, SPARSE}),
        (_Graphs, "_prepare_forward_metadata_for_replay", {DENSE, SPARSE}),
        (BreakableCudaGraphBackend, "replay", {DENSE, SPARSE}),
    ],
)
def test_a_hook_that_is_not_in_place_leaves_its_part_out(
    owner: type, name: str, off: set[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda self: None)

    assert _off(_engine()) == off


def test_another_attention_has_none_of_it() -> None:
    engine = _engine()
    other = Engine(engine.runner, SimpleNamespace(), engine.graphs)

    assert {part for part in _ALL if why_not(part, other) == _OTHER} == _ALL


def test_the_page_shows_the_table() -> None:
    page = (REPOSITORY / "docs/sglang.md").read_text(encoding="utf-8")
    lines = as_markdown()

    assert "\n".join(lines) in page
    assert all(any(row.reason in line for line in lines) for row in ROWS)
