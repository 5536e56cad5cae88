"""The schedule of DeepGEMM's paged MQA logits, for any number of rows and without a compile a size.

A schedule says where each SM starts: row by row the contexts are cut into segments of 256 keys,
and each SM gets as many as the next, or one more. Bit for bit what DeepGEMM computes, so that its
logits kernel takes it.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import triton
import triton.language as tl

SEGMENT = 256
"""Keys of a segment: 64 a page by 4 warp groups."""


class Split(StrEnum):
    """How a build of DeepGEMM deals segments to SMs."""

    FIRST_MORE = "first_more"
    """The first SMs get one more: sgl-deep-gemm 0.1.0, DeepGEMM before 88965b0."""
    LAST_MORE = "last_more"
    """The last SMs get one more: the SM90 kernels since."""
    WHOLE_ROWS = "whole_rows"
    """The first SMs get one more, and rows of next_n queries are not divided: SM100 since."""


def _unit(split: Split, next_n: int) -> int:
    """How often a row's segments are scheduled: on SM90 once for each two queries."""
    return next_n if split is Split.WHOLE_ROWS else (next_n + 1) // 2


def mqa_schedule_reference(context_lens: torch.Tensor, sms: int, split: Split) -> torch.Tensor:
    """`mqa_schedule` in plain torch, on any device."""
    unit = _unit(split, context_lens.shape[1])
    segments = (context_lens[:, -1].long() + SEGMENT - 1) // SEGMENT
    ends = segments.cumsum(0) * unit
    each, rest = ends[-1] // sms, ends[-1] % sms
    sm = torch.arange(sms + 1, device=context_lens.device)
    more = (sm - (sms - rest)).clamp_min(0) if split is Split.LAST_MORE else sm.minimum(rest)
    start = sm * each + more
    row = torch.searchsorted(ends, start, right=True)
    nothing = ends.new_zeros(1)
    offset = start - torch.cat((nothing, ends))[row]
    own = torch.cat((segments, nothing))[row].clamp_min(1)
    if split is Split.WHOLE_ROWS:
        out = torch.stack((row * unit, offset // unit), dim=1)
    else:
        out = torch.stack((row * unit + offset // own, offset % own), dim=1)
    return out.int()


@triton.jit
def _schedule_kernel(
    context_lens, out, rows, next_n, sms,
    UNIT: tl.constexpr, LAST_MORE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sm = tl.program_id(0)
    last = context_lens + next_n - 1
    total = tl.zeros([BLOCK], tl.int32)
    for at in range(0, rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        length = tl.load(last + row * next_n, mask=row < rows, other=0)
        total += (length + LENGTH - 1) // LENGTH
    work = tl.sum(total, 0) * UNIT
    each = work // sms
    rest = work % sms
    more = tl.maximum(sm - (sms - rest), 0) if LAST_MORE else tl.minimum(sm, rest)
    start = sm * each + more

    # Count the rows that end at or before `start`; the last of them ends after `before` segments.
    done = 0
    before = 0
    at = 0
    while at < rows:
        row = at + tl.arange(0, BLOCK)
        length = tl.load(last + row * next_n, mask=row < rows, other=0)
        segments = (length + LENGTH - 1) // LENGTH
        block = tl.sum(segments, 0)
        if (before + block) * UNIT <= start:
            before += block
            done += tl.minimum(rows - at, BLOCK)
            at += BLOCK
        else:
            ends = before + tl.cumsum(segments, 0)
            passed = (ends * UNIT <= start) & (row < rows)
            done += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
            at = rows

    length = tl.load(last + done * next_n, mask=done < rows, other=0)
    own = tl.maximum((length + LENGTH - 1) // LENGTH, 1)
    offset = start - before * UNIT
    if WHOLE_ROWS:
        tl.store(out + 2 * sm, done * UNIT)
        tl.store(out + 2 * sm + 1, offset // UNIT)
    else:
        tl.store(out + 2 * sm, done * UNIT + offset // own)
        tl.store(out + 2 * sm + 1, offset % own)


def mqa_schedule(context_lens: torch.Tensor, sms: int, split: Split) -> torch.Tensor:
    """Where each SM starts in the paged MQA logits of these rows.

    Args:
        context_lens: [rows, next_n] int32, contiguous, at least 1 each.
        sms: SMs that the logits kernel runs on.
        split: how the build of DeepGEMM that will read the schedule deals it.

    Returns:
        [sms + 1, 2] int32: first row (on SM90 first pair of queries) and segment in it; the last
        entry is the end.
    """
    assert context_lens.is_contiguous()
    rows, next_n = context_lens.shape
    out = torch.empty(sms + 1, 2, dtype=torch.int32, device=context_lens.device)
    _schedule_kernel[(sms + 1,)](
        context_lens, out, rows, next_n, sms,
        UNIT=_unit(split, next_n), LAST_MORE=split is Split.LAST_MORE,
        WHOLE_ROWS=split is Split.WHOLE_ROWS, LENGTH=SEGMENT, BLOCK=256 if rows <= 256 else 2048,
        num_warps=4,
    )  # fmt: skip
    return out
