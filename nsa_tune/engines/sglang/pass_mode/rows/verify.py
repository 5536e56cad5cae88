"""A prefill of few tokens as verify passes, for engines with speculative decoding (MTP, EAGLE).

Their decode graphs verify the draft tokens of each request: so many rows at consecutive positions,
of which each reads the keys up to its own position. So `width` new tokens of a sequence can be the
rows of one such request. In every layer all rows write their keys before any row reads.

Where a sequence's new tokens are no multiple of `width`, its last request begins so much earlier.
The rows that this adds are tokens that have a row already, or that lie in the prefix: they write to
slot 0, which SGLang keeps for padding, and what they compute is left out. Only a sequence that is
shorter than one request has rows behind its end. These read slots that hold nothing of it, and are
left out too.
"""

from __future__ import annotations

from typing import Any

from nsa_tune.engines.sglang.pass_mode.rows.rows import (
    Rows,
    count_rows,
    to_device,
    without_extend,
)


def requests_of(extend_lens: list[int], width: int) -> int:
    """The requests of `width` rows that take sequences with so many new tokens."""
    return sum(-(-new // width) for new in extend_lens)


def as_verify(forward_batch: Any, width: int) -> Rows:
    """The new tokens of an extend batch as rows of verify passes.

    Args:
        forward_batch: SGLang's ForwardBatch in mode EXTEND, with new tokens in each sequence. It
            is not changed.
        width: rows of a request in the captured graphs.
    """
    import torch

    prefix = torch.tensor(forward_batch.extend_prefix_lens_cpu)
    new = torch.tensor(forward_batch.extend_seq_lens_cpu)
    counts = (new + width - 1) // width
    owners = torch.repeat_interleave(counts)
    number = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    stops = (prefix + new)[owners]
    begins = prefix[owners] + width * number
    starts = torch.minimum(begins, stops - width).clamp_(min=0)
    positions = starts[:, None] + torch.arange(width)
    taken = (positions >= begins[:, None]) & (positions < stops[:, None])
    # Where a token stands in the extend batch; the others take some token's id.
    offsets = (new.cumsum(0) - new - prefix)[owners]
    sources = torch.where(taken, positions + offsets[:, None], 0)
    tokens = taken.flatten().nonzero().squeeze(1)

    batch = without_extend(forward_batch, "TARGET_VERIFY")
    batch.batch_size = len(owners)
    batch.seq_lens_cpu = starts
    batch.seq_lens_sum = int(starts.sum())
    _fill(batch, forward_batch, sources.flatten(), positions.flatten(), taken, owners)
    count_rows(batch, positions.numel())
    return Rows(batch, width, tokens, tokens[new.cumsum(0) - 1].tolist())


def _fill(batch: Any, extend: Any, sources: Any, positions: Any, taken: Any, owners: Any) -> None:
    """Write the tensors on the device, for which one copy goes there."""
    import torch

    parts = [sources, positions, taken.flatten().long(), owners, batch.seq_lens_cpu]
    sizes = [len(part) for part in parts]
    sources, positions, taken, owners, starts = to_device(torch.cat(parts), extend.input_ids).split(
        sizes
    )
    batch.input_ids = extend.input_ids.index_select(0, sources)
    batch.positions = positions.to(extend.positions.dtype)
    slots = extend.out_cache_loc
    batch.out_cache_loc = slots.index_select(0, sources) * taken.to(slots.dtype)
    batch.req_pool_indices = extend.req_pool_indices.index_select(0, owners)
    # What a request has before these rows: SGLang adds `width` by itself.
    batch.seq_lens = starts.to(extend.seq_lens.dtype)
    batch.orig_seq_lens = starts.to(torch.int32)
