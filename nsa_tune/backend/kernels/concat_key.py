"""Build the keys of expanded MHA: each head's own part, then the rope part that all heads share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 16


def concat_key_reference(expanded: torch.Tensor, rope: torch.Tensor, nope: int) -> torch.Tensor:
    """`concat_key` in plain torch, on any device."""
    shared = rope[:, None, :].expand(-1, expanded.shape[1], -1)
    return torch.cat((expanded[..., :nope], shared), dim=-1)


@triton.jit
def _concat_key_kernel(
    expanded, rope, out, heads, rope_stride, expanded_width,
    NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # 64-bit: 131072 tokens of 128 heads and 192 values pass 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    row = token * heads + head
    column = tl.arange(0, NOPE_BLOCK)[None, :]
    inside = here & (column < NOPE)
    own = tl.load(expanded + row[:, None] * expanded_width + column, mask=inside)
    tl.store(out + row[:, None] * (NOPE + ROPE) + column, own, mask=inside)
    column = tl.arange(0, ROPE)
    shared = tl.load(rope + token * rope_stride + column)
    shared = tl.broadcast_to(shared[None, :], (HEADS, ROPE))
    tl.store(out + row[:, None] * (NOPE + ROPE) + NOPE + column[None, :], shared, mask=here)


def concat_key(expanded: torch.Tensor, rope: torch.Tensor, nope: int) -> torch.Tensor:
    """Keys [tokens, heads, nope + rope] of expanded latents.

    Args:
        expanded: [tokens, heads, nope + v] bf16, contiguous: what kv_b_proj returns.
        rope: [tokens, rope] bf16, its last dimension contiguous; rope is a power of two.
        nope: width of a head's own part.
    """
    tokens, heads, width = expanded.shape
    out = torch.empty(
        tokens, heads, nope + rope.shape[1], dtype=expanded.dtype, device=expanded.device
    )
    _concat_key_kernel[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        expanded, rope, out, heads, rope.stride(0), width,
        NOPE=nope, NOPE_BLOCK=triton.next_power_of_2(nope), ROPE=rope.shape[1],
        HEADS=_HEADS_PER_PROGRAM,
    )  # fmt: skip
    return out
