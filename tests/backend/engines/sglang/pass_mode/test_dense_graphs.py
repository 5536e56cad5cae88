"""Dense graphs on a runner that notes what is captured."""

from __future__ import annotations

import itertools
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.engines.sglang.pass_mode import dense_graphs as module
from nsa_tune.backend.engines.sglang.pass_mode.dense_graphs import (
    LABEL,
    DenseGraphs,
    most_sequences,
)

TOPK = 2048


@dataclass(frozen=True)
class _Key:
    """As SGLang's ShapeKey."""

    size: int
    stream_idx: int | None = None
    variant_label: str | None = None


@dataclass(frozen=True)
class _Metadata:
    """As SGLang's DSAMetadata."""

    max_seq_len_q: int
    max_seq_len_k: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table_1: str = "left alone"


class _Attention:
    use_mha = False
    forward_metadata: _Metadata

    def init_forward_metadata(self, batch: Any) -> None:
        ends = torch.tensor([0, batch.size], dtype=torch.int32)
        self.forward_metadata = _Metadata(batch.size, batch.size, ends, ends)


@dataclass
class _Runner:
    """Captures by calling the forward pass, and keeps what attention would have read then."""

    current: ContextVar[object]
    device: str = "cpu"
    fails: bool = False
    attention: _Attention = field(default_factory=_Attention)
    captured: dict[Any, tuple[_Metadata, bool, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = self

    def capture_prepare(self, size: int) -> tuple[Any, _Attention]:
        return SimpleNamespace(size=size), self.attention

    def _run_forward(self, batch: Any, size: int) -> Any:
        assert batch.size == size
        if self.fails:
            raise RuntimeError("made up")
        return self.attention.forward_metadata, self.attention.use_mha, self.current.get()

    def capture_one(self, key: Any, forward: Any) -> None:
        token = self.current.set("a capture")
        try:
            self.captured[key] = forward()
            assert self.current.get() == "a capture"
        finally:
            self.current.reset(token)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> _Runner:
    current: ContextVar[object] = ContextVar("current", default=None)
    breaks, keys = ModuleType("breaks"), ModuleType("keys")
    vars(breaks)["_current_capture_var"] = current
    vars(keys)["ShapeKey"] = _Key
    monkeypatch.setitem(sys.modules, module._BREAKS, breaks)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner.shape_key", keys)
    return _Runner(current)


@given(st.integers(1, 100_000))
def test_a_graph_takes_some_sequences_and_not_too_many(size: int) -> None:
    assert 4 <= most_sequences(size) <= 64


@pytest.mark.parametrize("size", [4, 100, 2048, 8192])
def test_a_graph_is_captured_without_breaks_and_with_mha(runner: _Runner, size: int) -> None:
    graphs = DenseGraphs(runner, TOPK)
    graphs.capture(size)

    metadata, mha, current = runner.captured[_Key(size, variant_label=LABEL)]
    assert mha
    assert current is None
    assert metadata.cu_seqlens_q is metadata.cu_seqlens_k
    assert metadata.max_seq_len_q == metadata.max_seq_len_k == min(size, TOPK)
    assert metadata.page_table_1 == "left alone"
    starts = metadata.cu_seqlens_q.tolist()
    assert len(starts) == most_sequences(size) + 1
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, size)
    longest = max(b - a for a, b in itertools.pairwise(starts))
    assert longest <= metadata.max_seq_len_q
    assert not runner.attention.use_mha
    assert graphs.sizes == [size]


def test_a_capture_that_fails_leaves_mha_off_and_no_size(runner: _Runner) -> None:
    runner.fails = True
    graphs = DenseGraphs(runner, TOPK)
    with pytest.raises(RuntimeError):
        graphs.capture(64)

    assert not runner.attention.use_mha
    assert graphs.sizes == []
    assert not graphs.fits(64, 1)


def test_only_what_was_captured_fits(runner: _Runner) -> None:
    graphs = DenseGraphs(runner, TOPK)
    graphs.capture(1024)

    assert graphs.fits(1024, most_sequences(1024))
    assert not graphs.fits(1024, most_sequences(1024) + 1)
    assert not graphs.fits(512, 1)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
def test_a_replays_lengths_are_written_where_the_graph_reads_them(lens: list[int]) -> None:
    size, filled = 8192, [new for new in lens if new]
    graphs = DenseGraphs(SimpleNamespace(), TOPK)
    tensor = torch.full((most_sequences(size) + 1,), -1, dtype=torch.int32)
    graphs._lengths[size] = tensor

    graphs.prepare(size, lens)

    starts = tensor.tolist()
    assert graphs._lengths[size] is tensor
    assert [b - a for a, b in itertools.pairwise(starts) if b > a] == filled
    assert starts[0] == 0
    assert set(starts[len(filled) :]) == {sum(lens)}


def test_padding_does_not_count_as_a_sequence() -> None:
    """Sequences without tokens may be more than the graph takes."""
    graphs = DenseGraphs(SimpleNamespace(), TOPK)
    graphs._lengths[64] = torch.zeros(5, dtype=torch.int32)

    graphs.prepare(64, [10, 20, 5, 1] + [0] * 9)

    assert graphs._lengths[64].tolist() == [0, 10, 30, 35, 36]
