"""Which dense graphs are captured, in which order, and where none are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.backend.engines.sglang.pass_mode.dense import capture as module
from nsa_tune.backend.engines.sglang.pass_mode.dense.capture import capture_all, captured
from nsa_tune.backend.engines.sglang.pass_mode.dense.graphs import Kind
from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.ranks.ranks import Ranks
from tests.backend.engines.sglang.pass_mode.fakes import Dense


@pytest.fixture(autouse=True)
def nothing_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda runner: None)


def _runner(*, is_draft_worker: bool = False) -> Any:
    """SGLang's ModelRunner."""
    return SimpleNamespace(
        is_draft_worker=is_draft_worker,
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1),
        attn_backend=SimpleNamespace(
            dsa_index_topk=2048, num_q_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64
        ),
        model_config=SimpleNamespace(v_head_dim=128),
    )


def test_a_draft_worker_captures_none_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some ranks may have one."""

    def never(self: Any, question: str, answer: str) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(Ranks, "all_say", never)
    graphs = SimpleNamespace(model_runner=_runner(is_draft_worker=True))
    capture_all(graphs)

    assert captured(graphs) == {}


def test_dense_graphs_are_not_captured_where_something_speaks_against_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: "it is Tuesday")
    graphs = SimpleNamespace(model_runner=_runner())
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert set(vars(graphs)) == {"model_runner"}
    assert "no dense prefill graphs: it is Tuesday" in caplog.text


@pytest.mark.parametrize(
    ("against_absorbed", "modes"),
    [
        (None, {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}),
        ("it is Tuesday", {PassMode.DENSE_GRAPH: Kind.MHA}),
    ],
)
def test_all_sizes_are_captured_the_largest_first(
    against_absorbed: str | None, modes: dict[PassMode, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does it, so that the smaller ones take the memory of the larger."""
    order: list[tuple[Kind, int]] = []

    class Captures(Dense):
        def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
            super().__init__([], kind)
            assert index_topk == 2048

        def capture(self, size: int) -> None:
            order.append((self.kind, size))
            self.sizes = sorted([*self.sizes, size])

    monkeypatch.setattr(module, "why_no_absorbed_graphs", lambda runner: against_absorbed)
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 2**31))
    graphs = SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 512, 64])
    capture_all(graphs)

    assert order == [(kind, size) for kind in modes.values() for size in (512, 64, 4)]
    assert {mode: dense.kind for mode, dense in captured(graphs).items()} == modes


@pytest.mark.parametrize(("free_mib", "enough"), [(2048, True), (500, False)])
def test_no_dense_graphs_are_captured_where_memory_may_run_out(
    free_mib: int, enough: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Captures(Dense):
        def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
            super().__init__([], kind)

        def capture(self, size: int) -> None:
            self.sizes = sorted([*self.sizes, size])

    monkeypatch.setattr(module, "why_no_absorbed_graphs", lambda runner: "it is Tuesday")
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: None)
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free_mib * 2**20, 2**40))
    graphs = SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 64])
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert bool(captured(graphs)) == enough
    assert ("500 MiB of memory are free" in caplog.text) != enough
