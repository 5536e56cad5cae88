"""Which sparse graphs there are, which batches they run, and what they are captured with."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.whole_pass import attention, unbroken
from nsa_tune.engines.sglang.pass_mode.whole_pass import sparse_graphs as module
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_graphs import SparseGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_inputs import SEQUENCES

TOPK, POOL = 2048, 60_000


class _Attention:
    def __init__(self, *, packed: bool) -> None:
        self.dsa_kv_cache_store_fp8 = packed

    def init_forward_metadata(self, batch: Any) -> None:
        """SGLang's own metadata, which nothing reads."""


class _Runner:
    """SGLang's PrefillCudaGraphRunner: captures by calling the forward pass."""

    device = "cpu"
    capture_num_tokens = (4, 32, 64, 512, 2048, 2304, 8192)

    def __init__(self) -> None:
        self.backend, self.attention = self, _Attention(packed=False)
        self.layer_model = SimpleNamespace(start_layer=0, end_layer=61)
        self.captured: dict[Any, Any] = {}
        self.checked: list[Any] = []
        table = torch.arange(40 * 4096, dtype=torch.int32).view(40, 4096)
        self.model_runner = SimpleNamespace(
            max_total_num_tokens=POOL, req_to_token_pool=SimpleNamespace(req_to_token=table)
        )

    def capture_prepare(self, size: int) -> tuple[Any, _Attention]:
        return SimpleNamespace(size=size), self.attention

    def _run_forward(self, batch: Any, size: int) -> Any:
        assert int(batch.seq_lens_cpu.max()) > TOPK  # the indexer must not skip its scores
        return attention._swap

    def capture_one(self, key: Any, forward: Any) -> None:
        self.captured[key] = forward()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> _Runner:
    breaks, keys = ModuleType("breaks"), ModuleType("keys")
    vars(breaks)["_current_capture_var"] = ContextVar("current", default=None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    vars(keys)["ShapeKey"] = lambda size, variant_label: (size, variant_label)
    monkeypatch.setitem(sys.modules, unbroken._BREAKS, breaks)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner.shape_key", keys)
    made = _Runner()
    monkeypatch.setattr("nsa_tune.backend.kernels.sampled_topk.compile_all", made.checked.append)
    monkeypatch.setattr(module, "check", lambda topk, device: made.checked.append("right"))
    return made


def test_graphs_are_captured_where_the_gpu_would_wait_for_the_host(runner: _Runner) -> None:
    assert SparseGraphs(runner, TOPK).wanted() == [64, 512, 2048]


def test_a_graph_is_captured_with_its_own_attention_and_selection(runner: _Runner) -> None:
    graphs = SparseGraphs(runner, TOPK)
    graphs.capture(512)

    assert runner.checked == [TOPK, "right"], "it is compiled while other graphs are captured"
    (swap,) = runner.captured.values()
    assert list(runner.captured) == [graphs.key(512)]
    assert swap.backend is runner.attention
    assert len(swap.metadata.get_seqlens_expanded()) == len(swap.attend.rows.selected) == 512
    assert swap.attend.read is None
    assert attention._swap is None
    assert graphs.sizes == [512]


def test_over_an_fp8_pool_a_graph_reads_the_keys_of_its_batch_back(runner: _Runner) -> None:
    runner.attention = _Attention(packed=True)
    graphs = SparseGraphs(runner, TOPK)
    graphs.capture(512)

    (swap,) = runner.captured.values()
    assert int(swap.attend.read.count) == 512  # of all that there is room for
    assert len(swap.attend.read.slots) == POOL // PAGE * PAGE


def test_only_what_was_captured_and_has_room_fits(runner: _Runner) -> None:
    graphs = SparseGraphs(runner, TOPK)
    graphs.capture(512)

    def fits(prefix_lens: list[int], extend_lens: list[int], size: int = 512) -> bool:
        return graphs.fits(size, Batch.extend(prefix_lens=prefix_lens, extend_lens=extend_lens))

    most = POOL // PAGE * PAGE
    assert fits([30_000, 0], [100, 3])
    assert not fits([30_000, 0], [100, 3], 64)
    assert fits([most - 8], [8])
    assert not fits([most - 7], [8])
    assert fits([0] * SEQUENCES, [1] * SEQUENCES)
    assert not fits([0] * (SEQUENCES + 1), [1] * (SEQUENCES + 1))


def test_a_batch_is_written_where_all_graphs_read_it(runner: _Runner) -> None:
    """A padded batch ends in sequences without tokens, which do not count."""
    graphs = SparseGraphs(runner, TOPK)
    graphs.prepare(
        64,
        SimpleNamespace(
            extend_seq_lens_cpu=[5, 30, 0],
            extend_prefix_lens_cpu=[700, 0, 0],
            req_pool_indices=torch.tensor([3, 1, 0]),
        ),
    )

    rows = graphs._inputs.rows(64, TOPK)
    assert rows.kv_lens.tolist() == [*range(701, 706), *range(1, 31), *[1] * 29]
    table = runner.model_runner.req_to_token_pool.req_to_token
    assert torch.equal(graphs._inputs.pages[0, :12], table[3, :705:PAGE] // PAGE)
    assert int(graphs._inputs.pages[1, 0]) == int(table[1, 0]) // PAGE
