"""A prefill of few tokens as decode passes: each new token is a row of a decode CUDA graph.

In every layer all rows write their keys before any row reads, and a row reads only the keys up to
its own position. So the new tokens of a sequence can be rows of one decode pass, as if they were
sequences that share a prefix. The decode graph has no breaks, which SGLang's prefill graph has two
of in each layer. More tokens than a graph has rows go into several passes, in order.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from nsa_tune.engines.sglang.pass_mode.rows.rows import Rows, to_device, without_extend


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
    batch = without_extend(forward_batch, "DECODE")
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
    return Rows(batch, 1, None, ends)


def _repeated(indices: Any, counts: list[int], total: int) -> Any:
    """Each of `indices` as often as `counts` says; the host does not wait for the device."""
    if len(counts) == 1:
        return indices.repeat(total)
    return indices.repeat_interleave(to_device(counts, indices), output_size=total)
