"""A prefill of few tokens as decode passes: each new token is a row of a decode CUDA graph.

In every layer all rows write their keys before any row reads, and a row reads only the keys up to
its own position. So the new tokens of a sequence can be rows of one decode pass, as if they were
sequences that share a prefix. The decode graph has no breaks, which SGLang's prefill graph has two
of in each layer. More tokens than a graph has rows go into several passes, in order.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

__all__ = ["Part", "Rows", "as_decode", "last_rows"]

_EXTEND_ONLY = (
    "extend_num_tokens",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "extend_prefix_lens_cpu",
    "extend_seq_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "extend_input_logprob_token_ids_gpu",
    "next_token_logits_buffer",
)
_PER_ROW = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "seq_lens",
    "orig_seq_lens",
    "seq_lens_cpu",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One decode pass."""

    forward_batch: Any
    """SGLang's ForwardBatch in mode DECODE."""
    ends: list[int]
    """Rows of it that are the last tokens of their sequences."""


@dataclass(frozen=True, slots=True)
class Rows:
    """All new tokens of a prefill, as rows."""

    forward_batch: Any
    """SGLang's ForwardBatch in mode DECODE, of all rows."""
    ends: list[int]
    """Rows that are the last tokens of their sequences."""

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return int(self.forward_batch.batch_size)

    def part(self, start: int, stop: int) -> Part:
        """Rows `start` to `stop` as a pass of their own."""
        if (start, stop) == (0, self.batch_size):
            return Part(self.forward_batch, self.ends)
        batch = copy.copy(self.forward_batch)
        for name in _PER_ROW:
            setattr(batch, name, getattr(batch, name)[start:stop])
        batch.batch_size = stop - start
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        return Part(batch, [end - start for end in self.ends if start <= end < stop])


def as_decode(forward_batch: Any) -> Rows:
    """The new tokens of an extend batch as rows of decode passes.

    Args:
        forward_batch: SGLang's ForwardBatch in mode EXTEND, with new tokens in each sequence. It
            is not changed.
    """
    import torch

    prefix_lens = forward_batch.extend_prefix_lens_cpu
    extend_lens = forward_batch.extend_seq_lens_cpu
    ends = [end - 1 for end in accumulate(extend_lens)]
    rows = ends[-1] + 1
    batch = copy.copy(forward_batch)
    for name in _EXTEND_ONLY:
        setattr(batch, name, None)
    batch.forward_mode = batch.global_forward_mode = type(forward_batch.forward_mode).DECODE
    batch.batch_size = rows
    batch.seq_lens_cpu = torch.cat(
        [
            torch.arange(prefix + 1, prefix + new + 1)
            for prefix, new in zip(prefix_lens, extend_lens, strict=True)
        ]
    )
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.seq_lens = (forward_batch.positions + 1).to(forward_batch.seq_lens.dtype)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.req_pool_indices = _repeated(forward_batch.req_pool_indices, extend_lens, rows)
    return Rows(batch, ends)


def last_rows(logits: Any, ends: list[int]) -> Any:
    """Rows of logits [rows, vocabulary]: [ends, vocabulary]; None where there are no ends."""
    if not ends:
        return None
    if len(ends) == 1:
        # A copy: the next pass of the same graph writes where this one's logits are.
        return logits[ends[0] : ends[0] + 1].clone()
    return logits.index_select(0, _to_device(ends, logits))


def _repeated(indices: Any, counts: list[int], total: int) -> Any:
    """Each of `indices` as often as `counts` says; the host does not wait for the device."""
    if len(counts) == 1:
        return indices.repeat(total)
    return indices.repeat_interleave(_to_device(counts, indices), output_size=total)


def _to_device(numbers: list[int], beside: Any) -> Any:
    import torch

    host = torch.tensor(numbers, pin_memory=beside.is_cuda)
    return host.to(beside.device, non_blocking=True)
