"""Prefill CUDA graphs without breaks, in which attention is dense.

SGLang's prefill graphs break twice in each layer, for the indexer and for attention, and it turns
MHA off inside them. Where no sequence has a prefix or more keys than the indexer selects, both can
be captured: the indexer only stores its keys, and dense attention reads the lengths from a tensor
that lies in the same place in each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

__all__ = ["LABEL", "DenseGraphs", "most_sequences"]

LABEL = "nsa_tune_dense"
"""Beside the size, in the keys of these graphs."""
_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


def most_sequences(size: int) -> int:
    """Sequences that a graph of `size` tokens takes. Attention visits them all, empty or not."""
    return min(max(size // 64, 4), 64)


class DenseGraphs:
    """The dense graphs of one prefill graph runner."""

    def __init__(self, runner: Any, index_topk: int) -> None:
        """`runner` is SGLang's PrefillCudaGraphRunner."""
        self._runner = runner
        self._index_topk = index_topk
        self._lengths: dict[int, Any] = {}
        """By captured size: where attention finds each sequence's first row [sequences + 1]."""

    @property
    def sizes(self) -> list[int]:
        """The captured sizes, in tokens."""
        return sorted(self._lengths)

    def capture(self, size: int) -> None:
        """Capture the graph of `size` tokens. Call it within the runner's own capture session."""
        import torch

        runner = self._runner
        forward_batch, backend = runner.capture_prepare(size)
        backend.init_forward_metadata(forward_batch)
        sequences = most_sequences(size)
        lengths = torch.full((sequences + 1,), size, dtype=torch.int32, device=runner.device)
        most = min(size, self._index_topk)
        # The dummy sequence may be longer than attention is captured for.
        starts = list(range(0, size, most))[:sequences]
        lengths[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        backend.forward_metadata = replace(
            backend.forward_metadata, cu_seqlens_q=lengths, cu_seqlens_k=lengths,
            max_seq_len_q=most, max_seq_len_k=most,
        )  # fmt: skip
        backend.use_mha = True

        def forward() -> Any:
            with _no_breaks():
                return runner._run_forward(forward_batch, size)

        try:
            runner.backend.capture_one(self.key(size), forward)
        finally:
            backend.use_mha = False
        self._lengths[size] = lengths

    def fits(self, size: int, sequences: int) -> bool:
        """Whether there is a graph of `size` tokens for so many sequences."""
        return size in self._lengths and sequences <= most_sequences(size)

    def prepare(self, size: int, extend_lens: list[int]) -> None:
        """Write a batch's lengths to where the graph of `size` tokens reads them."""
        import torch

        lengths = self._lengths[size]
        starts, total = [0], 0
        for new in extend_lens:
            total += new
            starts.append(total)
        # Sequences that are not there begin and end where the last one ends.
        starts += [total] * (len(lengths) - len(starts))
        host = torch.tensor(starts, dtype=torch.int32, pin_memory=lengths.is_cuda)
        lengths.copy_(host, non_blocking=True)

    def key(self, size: int) -> Any:
        """Under which SGLang keeps the graph of `size` tokens."""
        shape_key = import_module("sglang.srt.model_executor.runner.shape_key").ShapeKey
        return shape_key(size=size, variant_label=LABEL)


@contextmanager
def _no_breaks() -> Iterator[None]:
    """What would break a graph under capture is captured instead."""
    current = import_module(_BREAKS)._current_capture_var
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)
