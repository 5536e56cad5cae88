"""Merge attention over two parts of the keys into attention over all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def merge_outputs_reference(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """`merge_outputs` in plain torch, on any device."""
    share = torch.stack((first_lse, second_lse)).mul(torch.log(torch.tensor(2.0))).softmax(0)
    merged = first.float() * share[0, ..., None] + second.float() * share[1, ..., None]
    return merged.to(first.dtype)


@triton.jit
def _merge_kernel(
    first, first_lse, second, second_lse, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # 64-bit: 131072 queries of 128 heads and 128 values are 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    a, b = tl.load(first_lse + row), tl.load(second_lse + row)
    most = tl.maximum(a, b)
    a, b = tl.exp2(a - most), tl.exp2(b - most)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    one = tl.load(first + row * WIDTH + column, mask=inside).to(tl.float32)
    other = tl.load(second + row * WIDTH + column, mask=inside).to(tl.float32)
    merged = (one * a + other * b) / (a + b)
    tl.store(out + row * WIDTH + column, merged.to(out.dtype.element_ty), mask=inside)


def merge_outputs(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Outputs [rows, heads, v] bf16 of attention over both parts.

    Args:
        first: [rows, heads, v] bf16, contiguous: attention over some keys.
        first_lse: [rows, heads] fp32, contiguous: log2 of the sum of their exponents; -inf where a
            row has no such key.
        second: the same over the other keys, of which every row has at least one of either part.
        second_lse: likewise.
    """
    out = torch.empty_like(first)
    width = first.shape[-1]
    _merge_kernel[(first_lse.numel(),)](
        first, first_lse, second, second_lse, out,
        WIDTH=width, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out
