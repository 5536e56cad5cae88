"""The new tokens of a prefill as rows of a decode graph, and what to take of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
_PER_ROW = ("input_ids", "positions", "out_cache_loc")
_PER_REQUEST = ("req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu")
_COUNTS = ("num_token_non_padded", "global_num_token_non_padded")
"""Rows that are no padding, on the device; the name depends on the release, None without experts
on several ranks."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A pass of a decode graph, or several passes in one."""

    forward_batch: Any
    """SGLang's ForwardBatch in the mode of the graphs."""
    width: int
    """Rows of a request, at consecutive positions."""
    tokens: Any
    """Rows that are new tokens, in their order: int64 on the host; None where all are."""
    ends: Sequence[int]
    """Rows that are the last tokens of their sequences."""

    @property
    def requests(self) -> int:
        """What the graph takes for requests."""
        return int(self.forward_batch.batch_size)

    def part(self, start: int, stop: int) -> Rows:
        """Requests `start` to `stop` as a pass of their own."""
        if (start, stop) == (0, self.requests):
            return self
        first, last = start * self.width, stop * self.width
        batch = copy.copy(self.forward_batch)
        for name in _PER_ROW:
            setattr(batch, name, getattr(batch, name)[first:last])
        for name in _PER_REQUEST:
            setattr(batch, name, getattr(batch, name)[start:stop])
        batch.batch_size = stop - start
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        count_rows(batch, last - first)
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens[(tokens >= first) & (tokens < last)] - first
        ends = [end - first for end in self.ends if first <= end < last]
        return Rows(batch, self.width, tokens, ends)

    def of_ends(self, logits: Any) -> Any:
        """Rows of logits [rows, vocabulary] of last tokens: [ends, vocabulary]; None without."""
        if not self.ends:
            return None
        if len(self.ends) == 1:
            # A copy: the next pass of the same graph writes where this one's outputs are.
            return logits[self.ends[0] : self.ends[0] + 1].clone()
        return logits.index_select(0, to_device(self.ends, logits))

    def of_tokens(self, states: Any) -> Any:
        """Rows of states [rows, width of the model] of new tokens: [new tokens, same]."""
        if self.tokens is None or len(self.tokens) == len(states):
            return states.clone()
        return states.index_select(0, to_device(self.tokens, states))


def without_extend(forward_batch: Any, mode: str) -> Any:
    """A copy of an extend batch in another forward mode, without what only extends have."""
    batch = copy.copy(forward_batch)
    for name in _EXTEND_ONLY:
        setattr(batch, name, None)
    batch.forward_mode = batch.global_forward_mode = type(forward_batch.forward_mode)[mode]
    return batch


def count_rows(batch: Any, rows: int) -> None:
    """Say in `batch` that none of its rows is padding: what is beyond reaches no expert."""
    for name in _COUNTS:
        count = getattr(batch, name, None)
        if count is not None:
            setattr(batch, name, count.new_full(count.shape, rows))


def to_device(numbers: Any, beside: Any) -> Any:
    """A list or an int64 tensor beside another tensor; the host does not wait for the device."""
    import torch

    host = torch.as_tensor(numbers)
    if beside.is_cuda:
        host = host.pin_memory()
    return host.to(beside.device, non_blocking=True)
