"""Which whole-pass graphs are captured, in which order, and where none are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.whole_pass import capture as module
from nsa_tune.engines.sglang.pass_mode.whole_pass.capture import capture_all, captured
from nsa_tune.engines.sglang.pass_mode.whole_pass.graph_buffers import GraphBuffers
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import Part
from tests.engines.sglang.pass_mode.fakes import Dense

AGAINST: dict[Part, str | None] = {}
"""What speaks against a part, in these tests."""


@pytest.fixture(autouse=True)
def against(monkeypatch: pytest.MonkeyPatch) -> None:
    AGAINST.clear()
    AGAINST.update({Part.DENSE_MLA: "it is Tuesday", Part.SPARSE: "it is Tuesday"})
    monkeypatch.setattr(module, "why_not", lambda part, engine: AGAINST.get(part))


class _Captures(Dense):
    """Graphs whose capture notes their sizes."""

    def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
        super().__init__([], kind)
        assert index_topk == 2048
        self._wanted = sorted(graphs.capture_num_tokens)

    def wanted(self) -> list[int]:
        return self._wanted

    def scratch_bytes(self) -> int:
        return 2**20

    def capture(self, size: int) -> None:
        self.sizes = sorted([*self.sizes, size])


def _runner(*, is_draft_worker: bool = False) -> Any:
    """SGLang's ModelRunner."""
    return SimpleNamespace(
        is_draft_worker=is_draft_worker,
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1),
        attn_backend=SimpleNamespace(
            dsa_index_topk=2048, num_q_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64
        ),
        model_config=SimpleNamespace(v_head_dim=128, num_hidden_layers=61),
    )


def test_a_draft_worker_captures_none_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some ranks may have one."""

    def never(self: Any, question: str, answer: str) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(Ranks, "agree", never)
    graphs = SimpleNamespace(model_runner=_runner(is_draft_worker=True))
    capture_all(graphs)

    assert captured(graphs) == {}


def test_dense_graphs_are_not_captured_where_something_speaks_against_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    AGAINST[Part.DENSE] = "it is Tuesday"
    graphs = SimpleNamespace(model_runner=_runner())
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert set(vars(graphs)) == {"model_runner"}
    assert "no whole-pass prefill graphs: it is Tuesday" in caplog.text


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

    class Captures(_Captures):
        def capture(self, size: int) -> None:
            order.append((self.kind, size))
            super().capture(size)

    AGAINST[Part.DENSE_MLA] = against_absorbed
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 2**31))
    graphs = SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 512, 64])
    capture_all(graphs)

    assert order == [(kind, size) for kind in modes.values() for size in (512, 64, 4)]
    assert {mode: dense.kind for mode, dense in captured(graphs).items()} == modes


@pytest.mark.parametrize(("free_mib", "enough"), [(2048, True), (500, False)])
def test_no_dense_graphs_are_captured_where_memory_may_run_out(
    free_mib: int, enough: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "DenseGraphs", _Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free_mib * 2**20, 2**40))
    graphs = SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 64])
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert bool(captured(graphs)) == enough
    # 2 graphs of 61 layers, twice the 1 MiB of scratch, and 512 MiB.
    assert ("capturing might take 537 MiB" in caplog.text) != enough
    assert ("500 MiB of memory are free" in caplog.text) != enough


class _AllReduce:
    """SGLang's custom all-reduce."""

    def __init__(self) -> None:
        self._graph_inputs: list[int] = []


class _Ranks:
    """This rank among two. The other fails at a size, has other buffers, or lacks memory."""

    rank, count = 0, 2

    def __init__(
        self, *, fails_at: int = 0, notes: str | None = None, no_room: PassMode | None = None
    ) -> None:
        self._fails_at, self._notes, self._no_room = fails_at, notes, no_room
        self.said: list[str | None] = []
        self.size = 0

    def together(self, what: str, call: Any) -> Any:
        result = call()
        return None if self.size == self._fails_at else result

    def agree(self, question: str, answer: str | None) -> bool:
        if question.startswith("room_for_"):
            return answer is not None and question != f"room_for_{self._no_room}s"
        self.said.append(answer)
        return question == "whole_pass_graphs" or answer == self._notes


def _two_ranks(
    ranks: _Ranks, monkeypatch: pytest.MonkeyPatch, *, own_fails_at: int = 0
) -> tuple[Any, _AllReduce]:
    """Prefill graphs whose capture notes two buffers each, and what notes them."""
    notes = _AllReduce()

    class Captures(_Captures):
        def capture(self, size: int) -> None:
            ranks.size = size
            notes._graph_inputs += [size]
            if size == own_fails_at:
                raise RuntimeError("made up: out of memory")
            notes._graph_inputs += [size]
            super().capture(size)

    monkeypatch.setattr(module, "Ranks", lambda runner: ranks)
    monkeypatch.setattr(GraphBuffers, "of_engine", lambda: GraphBuffers([notes]))
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**34, 2**35))
    return SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 64, 512]), notes


@pytest.mark.parametrize("against_mla", [None, "its hook is not in place"])
def test_ranks_agree_on_which_graphs_they_capture(
    against_mla: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that captured more than another would wait for it."""
    ranks = _Ranks()
    graphs, _ = _two_ranks(ranks, monkeypatch)
    AGAINST[Part.DENSE_MLA] = against_mla
    capture_all(graphs)

    (said,) = ranks.said
    assert ("dense_mla_graph" in (said or "")) == (against_mla is None)
    assert "[4, 64, 512]" in (said or "")


def test_what_another_rank_has_no_memory_for_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    AGAINST[Part.DENSE_MLA] = None
    graphs, notes = _two_ranks(_Ranks(no_room=PassMode.DENSE_GRAPH), monkeypatch)
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert list(captured(graphs)) == [PassMode.DENSE_MLA_GRAPH]
    assert notes._graph_inputs == [512, 512, 64, 64, 4, 4]
    assert "no dense_graphs: another rank has no room for them" in caplog.text


def test_memory_is_looked_at_again_before_each_kind_of_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those captured before may have taken it."""
    AGAINST[Part.DENSE_MLA] = None
    free = iter([2**34, 2**34, 2**28, 2**28])
    monkeypatch.setattr(module, "DenseGraphs", _Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (next(free), 2**35))
    graphs = SimpleNamespace(model_runner=_runner(), capture_num_tokens=[4, 64])
    with caplog.at_level("INFO"):
        capture_all(graphs)

    assert list(captured(graphs)) == [PassMode.DENSE_GRAPH]
    assert "no dense_mla_graphs: 256 MiB of memory are free" in caplog.text


def test_two_ranks_that_capture_all_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, notes = _two_ranks(_Ranks(), monkeypatch)
    capture_all(graphs)

    assert captured(graphs)[PassMode.DENSE_GRAPH].sizes == [4, 64, 512]
    assert notes._graph_inputs == [512, 512, 64, 64, 4, 4]


def test_a_graph_that_another_rank_could_not_capture_leaves_no_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = _Ranks(fails_at=64, notes="[2]")
    graphs, notes = _two_ranks(ranks, monkeypatch)
    capture_all(graphs)

    assert captured(graphs) == {}
    assert notes._graph_inputs == [512, 512]
    assert ranks.said[1:] == ["[2]"]
    assert "no dense_graphs: they could not be captured" in caplog.text


def test_a_graph_that_this_rank_could_not_capture_leaves_no_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of it may have been captured."""
    ranks = _Ranks(notes="[2]")
    graphs, notes = _two_ranks(ranks, monkeypatch, own_fails_at=64)
    capture_all(graphs)

    assert captured(graphs) == {}
    assert notes._graph_inputs == [512, 512]


@pytest.mark.parametrize("own_fails_at", [0, 64])
def test_ranks_that_are_left_with_different_buffers_stop_the_engine(
    own_fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would add up buffers that do not belong together."""
    ranks = _Ranks(fails_at=64, notes="[3]")
    graphs, _ = _two_ranks(ranks, monkeypatch, own_fails_at=own_fails_at)
    with pytest.raises(EngineMustStop, match=r"different buffers.*NSA_TUNE_DENSE_GRAPHS=0"):
        capture_all(graphs)
