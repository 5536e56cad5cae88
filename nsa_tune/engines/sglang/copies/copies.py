"""The copies themselves, for the tensors that SGLang passes; other tensors are left to it."""

from __future__ import annotations

from typing import Any

RANK, ROPE, BYTES = 512, 64, 656
"""A token of DeepSeek V3.2: numbers of its latent and its rope, bytes in a packed fp8 pool."""


def read_back(pool: Any, slots: Any) -> Any:
    """Gather tokens of SGLang's packed fp8 pool, widened to bf16: bit by bit as SGLang does it.

    Args:
        pool: [..., 656] float8_e4m3fn, contiguous.
        slots: [tokens] int32 or int64: places in the pool.

    Returns:
        [tokens, 1, 576] bf16; None for other tensors.
    """
    import torch

    from nsa_tune.backend.kernels import packed_fp8

    if not (
        pool.dtype is torch.float8_e4m3fn
        and pool.shape[-1] == BYTES
        and pool.is_contiguous()
        and slots.ndim == 1
        and slots.dtype in (torch.int32, torch.int64)
        and slots.is_contiguous()
    ):
        return None
    raw = pool.view(-1, BYTES).view(torch.uint8)
    return packed_fp8.dequantize(raw, slots, RANK, ROPE).unsqueeze(1)


def padded(q: Any, heads: int) -> Any:
    """Queries with more heads, whose values are whatever the memory held.

    SGLang writes zeros there. A head's output depends on its own queries alone, and the outputs of
    these heads are cut off.

    Args:
        q: [tokens, own heads, latent] bf16, contiguous; latent is a multiple of 4.
        heads: how many heads the result has.

    Returns:
        [tokens, heads, latent] bf16; None for other tensors.
    """
    import torch

    if not (q.ndim == 3 and q.dtype is torch.bfloat16 and q.is_contiguous() and not q.shape[2] % 4):
        return None
    out = q.new_empty((q.shape[0], heads, q.shape[2]))
    # Four values at a time: torch copies a slice of 64-bit numbers as fast as the memory goes.
    out.view(torch.int64)[:, : q.shape[1]].copy_(q.view(torch.int64))
    return out
