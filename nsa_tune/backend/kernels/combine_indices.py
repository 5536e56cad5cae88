"""Indices into [window tokens; extra tokens]: what one sparse attention call over both selects."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 128
_SHAPE = (16, 4)
"""(rows a program, warps): the fastest of those that were tried."""


def combined_width(window: int, extra: int) -> int:
    """Columns of the combined indices: a multiple of 128, as flash_mla_sparse_fwd needs on SM90."""
    return -(-(window + extra) // _COLUMNS) * _COLUMNS


@triton.jit
def _combine_kernel(
    window, window_lengths, extra, extra_lengths, out, lengths,
    rows, width, window_stride, extra_stride, shift,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = row < rows
    count = tl.load(window_lengths + row, mask=here, other=0)
    # 64-bit: 2**20 rows of 2176 indices pass 2**31.
    start = row.to(tl.int64)[:, None]
    inside = here[:, None] & (column < count[:, None])
    index = tl.load(window + start * window_stride + column, mask=inside, other=-1)
    more = tl.load(extra_lengths + row, mask=here, other=0)
    behind = column - count[:, None]
    inside = here[:, None] & (behind >= 0) & (behind < more[:, None])
    chosen = tl.load(extra + start * extra_stride + behind, mask=inside, other=-1)
    index = tl.where(chosen >= 0, chosen + shift, index)
    tl.store(out + start * width + column, index, mask=here[:, None])
    if tl.program_id(1) == 0:
        tl.store(lengths + row, count + more, mask=here)


def combine_indices(
    window: torch.Tensor,
    window_lengths: torch.Tensor,
    extra: torch.Tensor,
    extra_lengths: torch.Tensor,
    shift: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's window indices, then its extra ones moved behind all `shift` window tokens.

    Args:
        window: [tokens, columns] int32, indices of window tokens, rows contiguous.
        window_lengths: [tokens] int32: leading ones that count.
        extra: [tokens, columns] int32, indices of extra tokens, rows contiguous; -1 stays -1.
        extra_lengths: [tokens] int32: leading ones that count.
        shift: window tokens that lie before the extra ones.

    Returns:
        [tokens, a multiple of 128] int32, -1 behind the end, and [tokens] int32: how many count.
    """
    rows = window.shape[0]
    width = combined_width(window.shape[1], extra.shape[1])
    out = torch.empty(rows, width, dtype=torch.int32, device=window.device)
    lengths = torch.empty_like(window_lengths)
    each, warps = _SHAPE
    _combine_kernel[(triton.cdiv(rows, each), width // _COLUMNS)](
        window, window_lengths, extra, extra_lengths, out, lengths,
        rows, width, window.stride(0), extra.stride(0), shift,
        ROWS=each, COLUMNS=_COLUMNS, num_warps=warps,
    )  # fmt: skip
    return out, lengths
