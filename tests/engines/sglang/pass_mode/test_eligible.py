"""Each reason for which an engine is left alone, one at a time."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.hooking import wrapped
from nsa_tune.engines.sglang.pass_mode import eligible as module
from nsa_tune.engines.sglang.pass_mode.dense.absorbed import around_extend, around_k_only
from nsa_tune.engines.sglang.pass_mode.eligible import (
    DENSE_SWITCH,
    MODE_SWITCH,
    data_parallel,
    why_no_absorbed_graphs,
    why_no_decode_graphs,
    why_no_dense_graphs,
    why_not,
)
from nsa_tune.engines.sglang.pass_mode.hooks import around_prepare_metadata, around_replay
from nsa_tune.engines.sglang.releases import INDEXER
from tests.engines.sglang.pass_mode.fakes import Speculation

_PARALLEL = SimpleNamespace(attn_dp_size=1)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switches, one DP rank, and a backend with facts."""
    for name in (MODE_SWITCH, DENSE_SWITCH, module._LONGEST_DENSE, module._PLAN_STREAM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "parallel", lambda: _PARALLEL)
    monkeypatch.setattr(module, "facts_of", lambda *_: SimpleNamespace(kv_dtype="bf16"))


def _runner(attention: dict[str, Any] | None = None, **changes: Any) -> Any:
    arguments = {
        "pp_size": 1, "tp_size": 1, "moe_a2a_backend": "none", "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True, "enable_torch_symm_mem": False,
        "enable_mscclpp": False,
    }  # fmt: skip
    arguments |= {name: changes.pop(name) for name in list(changes) if name not in _ON_RUNNER}
    backend = {
        "set_dsa_prefill_impl": print, "device_sm_major": 9, "dsa_index_topk": 2048,
        "topk": 0, **(attention or {}),
    }  # fmt: skip
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        attn_backend=SimpleNamespace(
            **{name: value for name, value in backend.items() if value is not None}
        ),
        **{
            "is_generation": True,
            "spec_algorithm": Speculation.NONE,
            "decode_cuda_graph_runner": SimpleNamespace(capture_bs=[8]),
            **changes,
        },
    )


_MTP: dict[str, Any] = {"spec_algorithm": Speculation.EAGLE}
_ON_RUNNER = {"is_generation", "spec_algorithm", "decode_cuda_graph_runner"}


def test_a_plain_engine_is_not_left_alone() -> None:
    assert why_not(_runner()) is None
    assert why_no_decode_graphs(_runner()) is None


def test_chains_of_draft_tokens_are_not_left_alone() -> None:
    assert why_not(_runner(**_MTP)) is None
    assert why_no_decode_graphs(_runner(**_MTP, attention={"topk": 1})) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": {"set_dsa_prefill_impl": None}}, "is not DSA"),
        ({"enable_dp_attention": True, "elastic_ep_backend": "mooncake"}, "elastic"),
        ({"enable_dp_attention": True, "dwdp_size": 2}, "DWDP"),
        ({"enable_dp_attention": True, "enable_return_hidden_states": True}, "hidden states"),
        (
            {
                "enable_dp_attention": True,
                "spec_algorithm": SimpleNamespace(is_none=lambda: False),
            },
            "speculative decoding",
        ),
        ({"is_generation": False}, "does not generate"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"moe_a2a_backend": "deepep"}, "all-to-all"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_hierarchical_cache": True}, "layer by layer"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "PD multiplexing"),
        ({"startup_weight_load_mode": "overlap"}, "weights"),
    ],
)
def test_each_reason_is_found(changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_not(_runner(**changes)) or "")


def test_dp_attention_is_seen_where_its_argument_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "parallel", lambda: SimpleNamespace(attn_dp_size=2))
    monkeypatch.setenv(MODE_SWITCH, "1")

    assert data_parallel(_runner(enable_dp_attention=False))
    assert why_not(_runner(enable_dp_attention=False)) is None


def test_weights_that_are_loaded_first_are_no_reason() -> None:
    assert why_not(_runner(startup_weight_load_mode="sync")) is None


def test_an_expert_backend_of_none_is_no_all_to_all() -> None:
    assert why_not(_runner(moe_a2a_backend=None)) is None


def test_a_backend_without_facts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(backend: object, runner: object) -> None:
        raise LeftAlone("nothing is measured for it")

    monkeypatch.setattr(module, "facts_of", none)

    assert why_not(_runner()) == "nothing is measured for it"


@pytest.mark.parametrize("value", ["0", "false", " OFF ", "no"])
def test_the_switch_leaves_everything_to_sglang(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_SWITCH, value)

    assert why_not(_runner()) == f"{MODE_SWITCH} is set to 0"


@pytest.mark.parametrize("value", ["", "1", "yes"])
def test_other_values_of_the_switch_leave_it_on(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_SWITCH, value)

    assert why_not(_runner()) is None


@pytest.mark.parametrize(
    ("version", "value", "reason"),
    [
        ("0.5.17", "", None),
        ("0.5.17", "0", f"{MODE_SWITCH} is set to 0"),
        (
            "0.5.18", "",
            "with tensor parallelism in a version other than 0.5.17 it has to be asked for, "
            f"by {MODE_SWITCH}=1",
        ),
        ("0.5.18", "0", f"{MODE_SWITCH} is set to 0"),
        ("0.5.18", "1", None),
    ],
)  # fmt: skip
def test_with_tensor_parallelism_it_has_to_be_asked_for_where_it_never_ran(
    version: str, value: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "installed_version", lambda: version)
    if value:
        monkeypatch.setenv(MODE_SWITCH, value)

    assert why_not(_runner(tp_size=2)) == reason


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"enable_dp_attention": True}, "DP attention"),
        (_MTP, "tensor parallelism and speculative decoding"),
    ],
)
def test_where_it_ran_too_little_it_has_to_be_asked_for(
    changes: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "installed_version", lambda: "0.5.17")
    runner = _runner(tp_size=2, **changes)

    assert why_not(runner) == f"with {where} it has to be asked for, by {MODE_SWITCH}=1"
    monkeypatch.setenv(MODE_SWITCH, "1")
    assert why_not(runner) is None


def test_asking_for_it_does_not_outweigh_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_SWITCH, "1")

    assert "LoRA" in (why_not(_runner(tp_size=2, enable_lora=True)) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec_algorithm": Speculation.NGRAM}, "of another kind"),
        ({**_MTP, "attention": {"topk": 4}}, "trees"),
        ({**_MTP, "speculative_adaptive": True}, "changes while serving"),
        ({**_MTP, "enable_multi_layer_eagle": True}, "several draft layers"),
        ({"enable_return_routed_experts": True}, "routed experts"),
        ({"enable_return_indexer_topk": True}, "selected keys"),
        ({"disable_cuda_graph_padding": True}, "not padded"),
        ({"decode_cuda_graph_runner": None}, "none were captured"),
    ],
)
def test_each_reason_against_rows_is_found(changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_no_decode_graphs(_runner(**changes)) or "")


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_graphs_whose_inputs_another_stream_writes_are_left_alone(
    value: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module._PLAN_STREAM, value)

    assert (why_no_decode_graphs(_runner(**_MTP)) is not None) == off


class BreakableCudaGraphBackend:
    """Bears SGLang's name."""

    def replay(self, shape_key: object, batch: object) -> None:
        """Hooked below."""


class _Graphs:
    def __init__(self, runner: Any, backend: Any) -> None:
        self.model_runner = runner
        self.backend = backend

    def _prepare_forward_metadata_for_replay(self, batch: object, static: object) -> None:
        """Hooked below."""


def _graphs(*, replay: bool = True, prepare: bool = True, **changes: Any) -> Any:
    """A runner of prefill graphs with the plug-in's hooks."""
    method = "_prepare_forward_metadata_for_replay"
    own = BreakableCudaGraphBackend.replay, getattr(_Graphs, method)
    replays = {"replay": wrapped(own[0], around_replay)} if replay else {}
    prepares = {method: wrapped(own[1], around_prepare_metadata)} if prepare else {}
    backend = type("Backend", (BreakableCudaGraphBackend,), replays)()
    return type("Graphs", (_Graphs,), prepares)(_runner(**changes), backend)


def test_dense_graphs_are_captured_where_nothing_speaks_against_them() -> None:
    assert why_no_dense_graphs(_graphs()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": {"device_sm_major": 10}}, "on this GPU"),
        ({"attention": {"supports_mha_one_shot": False}}, "keeps attention sparse"),
        ({"debug_cuda_graph": True}, "debug_cuda_graph"),
        ({"enable_return_indexer_topk": True}, "selected keys"),
        ({"replay": False}, "hooks"),
        ({"prepare": False}, "hooks"),
    ],
)
def test_each_reason_against_dense_graphs_is_found(changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_no_dense_graphs(_graphs(**changes)) or "")


def test_graphs_of_another_kind_are_left_alone() -> None:
    """Their replay has no hook: they would run with another graph's metadata."""
    graphs = _graphs()
    graphs.backend = SimpleNamespace(replay=print)

    assert "breakable" in (why_no_dense_graphs(graphs) or "")


@pytest.mark.parametrize(
    ("value", "off"), [("0", True), ("2047", True), ("2048", False), ("", False)]
)
def test_sglangs_own_limit_of_dense_attention_holds(
    value: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module._LONGEST_DENSE, value)

    assert (why_no_dense_graphs(_graphs()) is not None) == off


@pytest.mark.parametrize("value", [None, "", " ", "1"])
def test_with_dp_attention_dense_graphs_have_to_be_asked_for(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPUs have run them."""
    if value is not None:
        monkeypatch.setenv(DENSE_SWITCH, value)
    reason = why_no_dense_graphs(_graphs(enable_dp_attention=True))

    assert (reason is None) == (value == "1")
    assert reason is None or f"by {DENSE_SWITCH}=1" in reason


@pytest.mark.parametrize(
    ("ranks", "changes", "captured"),
    [
        (1, {"disable_custom_all_reduce": False}, True),
        (2, {}, True),
        (2, {"disable_custom_all_reduce": False}, True),
        (2, {"enforce_disable_flashinfer_allreduce_fusion": False}, False),
        (2, {"enable_torch_symm_mem": True}, False),
        (2, {"enable_mscclpp": True}, False),
    ],
)
def test_with_faster_all_reduces_dense_graphs_have_to_be_asked_for(
    ranks: int, changes: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPUs have run them with any but NCCL's and SGLang's custom one."""
    graphs = _graphs(tp_size=ranks, **changes)

    assert (why_no_dense_graphs(graphs) is None) == captured
    monkeypatch.setenv(DENSE_SWITCH, "1")
    assert why_no_dense_graphs(graphs) is None


def test_the_dense_switch_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DENSE_SWITCH, "0")

    assert why_no_dense_graphs(_graphs()) == f"{DENSE_SWITCH} is set to 0"


@pytest.mark.parametrize(
    ("kv_dtype", "extend", "k_only", "reason"),
    [
        ("bf16", True, True, None),
        ("fp8", True, True, "no fp8 latents"),
        ("bf16", False, True, "hooks"),
        ("bf16", True, False, "hooks"),
    ],
)
def test_absorbed_graphs_need_both_hooks_and_a_bf16_pool(
    kv_dtype: str, extend: bool, k_only: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(self: object) -> None:
        """SGLang's method."""

    indexer = ModuleType("dsa_indexer")
    method = wrapped(own, around_k_only) if k_only else own
    vars(indexer)["Indexer"] = type("Indexer", (), {"_forward_cuda_k_only": method})
    monkeypatch.setitem(sys.modules, INDEXER, indexer)
    monkeypatch.setattr(module, "facts_of", lambda *_: SimpleNamespace(kv_dtype=kv_dtype))
    runner = _runner()
    method = wrapped(own, around_extend) if extend else own
    runner.attn_backend = type("Backend", (), {"forward_extend": method})()
    found = why_no_absorbed_graphs(runner)

    assert found is None if reason is None else reason in (found or "")
