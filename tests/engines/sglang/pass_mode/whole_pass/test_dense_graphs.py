"""Dense graphs on a runner that notes what is captured."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.whole_pass import attention, unbroken
from nsa_tune.engines.sglang.pass_mode.whole_pass.dense_graphs import (
    DenseGraphs,
    most_sequences,
    padding,
)
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind

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
    model_runner: Any = None
    capture_num_tokens: list[int] = field(default_factory=list)
    fails: bool = False
    attention: _Attention = field(default_factory=_Attention)
    captured: dict[Any, tuple[_Metadata, bool, Any, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = self
        self.layer_model = SimpleNamespace(start_layer=0, end_layer=61)

    def capture_prepare(self, size: int) -> tuple[Any, _Attention]:
        return SimpleNamespace(size=size), self.attention

    def _run_forward(self, batch: Any, size: int) -> Any:
        assert batch.size == size
        if self.fails:
            raise RuntimeError("made up")
        return (
            self.attention.forward_metadata, self.attention.use_mha, attention._swap,
            self.current.get(),
        )  # fmt: skip

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
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    vars(keys)["ShapeKey"] = _Key
    monkeypatch.setitem(sys.modules, unbroken._BREAKS, breaks)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner.shape_key", keys)
    return _Runner(current)


@given(st.integers(1, 100_000))
def test_a_graph_takes_some_sequences_and_not_too_many(size: int) -> None:
    most = min(size, TOPK)

    assert 4 <= most_sequences(size, most) - len(padding(size, most)) <= 64


@given(st.integers(0, 8192), st.integers(1, 2048))
def test_padding_fills_a_graph_up(rows: int, most: int) -> None:
    lens = padding(rows, most)

    assert sum(lens) == rows
    assert all(0 < new <= most for new in lens)


SIZES = pytest.mark.parametrize("size", [4, 100, 2048, 8192, 32768])


@SIZES
def test_a_graph_is_captured_without_breaks_and_with_mha(runner: _Runner, size: int) -> None:
    graphs = DenseGraphs(runner, TOPK, Kind.MHA)
    graphs.capture(size)

    metadata, mha, swap, current = runner.captured[_Key(size, variant_label=Kind.MHA)]
    assert mha
    assert swap is None
    assert current is None
    assert metadata.cu_seqlens_q is metadata.cu_seqlens_k
    assert metadata.max_seq_len_q == metadata.max_seq_len_k == min(size, TOPK)
    assert metadata.page_table_1 == "left alone"
    starts = metadata.cu_seqlens_q.tolist()
    assert len(starts) == most_sequences(size, min(size, TOPK)) + 1
    assert (starts[0], starts[-1]) == (0, size)
    assert all(0 <= b - a <= metadata.max_seq_len_q for a, b in pairwise(starts))
    assert not runner.attention.use_mha
    assert graphs.sizes == [size]


@SIZES
def test_a_graph_of_absorbed_attention_reads_its_own_tensors(runner: _Runner, size: int) -> None:
    graphs = DenseGraphs(runner, TOPK, Kind.MLA)
    graphs.capture(size)

    _, mha, swap, current = runner.captured[_Key(size, variant_label=Kind.MLA)]
    assert not mha
    assert current is None
    assert swap.attend.most == min(size, TOPK)
    inputs = swap.attend.inputs
    assert inputs is graphs._inputs[size]
    assert inputs.pages.shape == (most_sequences(size, min(size, TOPK)), TOPK // 64)
    assert attention._swap is None


def test_the_kinds_have_graphs_of_their_own(runner: _Runner) -> None:
    for kind in (Kind.MHA, Kind.MLA):
        DenseGraphs(runner, TOPK, kind).capture(64)

    assert len(runner.captured) == 2


@pytest.mark.parametrize("kind", [Kind.MHA, Kind.MLA])
def test_a_capture_that_fails_leaves_attention_as_it_was(runner: _Runner, kind: Kind) -> None:
    runner.fails = True
    graphs = DenseGraphs(runner, TOPK, kind)
    with pytest.raises(RuntimeError):
        graphs.capture(64)

    assert not runner.attention.use_mha
    assert attention._swap is None
    assert graphs.sizes == []
    assert not graphs.fits(64, _prompts(1))


def _prompts(count: int) -> Batch:
    return Batch.extend(prefix_lens=[0] * count, extend_lens=[1] * count)


def test_only_what_was_captured_fits(runner: _Runner) -> None:
    graphs = DenseGraphs(runner, TOPK, Kind.MHA)
    graphs.capture(1024)

    most = most_sequences(1024, 1024) - 1  # the last one is for padding
    assert graphs.fits(1024, _prompts(most))
    assert not graphs.fits(1024, _prompts(most + 1))
    assert not graphs.fits(512, _prompts(1))
    assert not graphs.fits(1024, Batch.extend(prefix_lens=[64], extend_lens=[8]))
    assert not graphs.fits(1024, Batch.extend(prefix_lens=[0], extend_lens=[TOPK + 1]))


@pytest.mark.parametrize(("sizes", "wanted"), [([8192, 64, 4, 48], [64, 8192]), ([4, 48], [48])])
def test_so_few_tokens_as_decode_graphs_take_have_no_graph(
    sizes: list[int], wanted: list[int], runner: _Runner
) -> None:
    runner.capture_num_tokens = sizes

    assert DenseGraphs(runner, TOPK, Kind.MHA).wanted() == wanted


def test_absorbed_attention_takes_prefixes_too(runner: _Runner) -> None:
    graphs = DenseGraphs(runner, TOPK, Kind.MLA)
    graphs.capture(1024)

    assert graphs.fits(1024, Batch.extend(prefix_lens=[TOPK - 8], extend_lens=[8]))
    assert not graphs.fits(1024, Batch.extend(prefix_lens=[TOPK - 7], extend_lens=[8]))


@given(st.sampled_from([4, 100, 2048, 8192, 32768]), st.data())
def test_a_batch_that_fits_has_room_for_its_padding(size: int, data: st.DataObject) -> None:
    graphs = DenseGraphs(_Runner(ContextVar("unused", default=None)), TOPK, Kind.MHA)
    inputs = graphs._inputs[size] = graphs._new_inputs(size)
    sequences = max(count for count in range(1, 65) if graphs.fits(size, _prompts(count)))
    longest = min(size // sequences, TOPK)
    one = st.integers(1, longest)
    lens = data.draw(st.lists(one, min_size=sequences, max_size=sequences))
    graphs.prepare(
        size, SimpleNamespace(extend_seq_lens_cpu=lens, extend_prefix_lens_cpu=[0] * sequences)
    )

    starts = inputs.starts.tolist()
    assert starts[-1] == size
    assert [b - a for a, b in pairwise(starts)][:sequences] == lens


def _prepared(
    runner: _Runner, size: int, prefix_lens: list[int], extend_lens: list[int]
) -> tuple[list[int], list[int], torch.Tensor]:
    """Rows, keys and pages of each sequence that attention would see."""
    graphs = DenseGraphs(runner, TOPK, Kind.MLA)
    inputs = graphs._inputs[size] = graphs._new_inputs(size)
    inputs.pages.fill_(-1)
    graphs.prepare(
        size,
        SimpleNamespace(
            extend_seq_lens_cpu=extend_lens,
            extend_prefix_lens_cpu=prefix_lens,
            req_pool_indices=torch.arange(len(extend_lens)) + 1,
        ),
    )
    assert graphs._inputs[size] is inputs
    starts = inputs.starts.tolist()
    return [b - a for a, b in pairwise(starts)], inputs.kv_lens.tolist(), inputs.pages


@given(
    st.lists(st.tuples(st.integers(0, 1900), st.integers(1, 130)), min_size=1, max_size=50),
    st.integers(0, 10),
)
def test_a_replays_lengths_and_pages_are_written_where_the_graph_reads_them(
    filled: list[tuple[int, int]], empty: int
) -> None:
    """Sequences without tokens, as a padded batch ends in, do not count."""
    size, lens = 8192, filled + [(7, 0)] * empty
    table = torch.arange(64 * 4096).view(64, 4096)
    runner = _Runner(ContextVar("unused", default=None))
    runner.model_runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    rows, kv_lens, pages = _prepared(
        runner, size, [one[0] for one in lens], [one[1] for one in lens]
    )

    count = len(filled)
    assert rows[:count] == [new for _, new in filled]
    assert kv_lens[:count] == [prefix + new for prefix, new in filled]
    assert sum(rows) == size  # each row belongs to a sequence: none is left as it was
    assert rows[count:] == kv_lens[count:]  # padding attends to no more keys than it has rows
    assert max(kv_lens) <= TOPK
    expected = torch.stack([table[i + 1, :TOPK:64] // 64 for i in range(count)])
    assert torch.equal(pages[:count], expected.to(pages.dtype))
    assert not pages[count:].any()


def test_a_context_shorter_than_what_is_selected_has_fewer_pages() -> None:
    table = torch.arange(8 * 1028).view(8, 1028)
    runner = _Runner(ContextVar("unused", default=None))
    runner.model_runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    _, kv_lens, pages = _prepared(runner, 512, [500, 0], [500, 12])

    assert kv_lens[:2] == [1000, 12]
    assert torch.equal(pages[:2, :17], (table[1:3, ::64] // 64).to(pages.dtype))
