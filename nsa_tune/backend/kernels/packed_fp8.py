"""The packed fp8 KV layout (656 bytes a token for V3.2): quantize, dequantize, paged gather.

A token is `rank` e4m3 values, one fp32 scale for each 128 of them, then `rope` bf16 values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_tune.backend.kernels.e4m3 import on_e4m3_grid
from nsa_tune.backend.types.layouts import SCALE_TILE, KVLayout

_E4M3_MAX = 448.0
_SMALLEST = 1e-4
"""The least magnitude that a scale is made for, so that a tile of zeros has one."""
_DEQUANTIZE = (8, 8)
"""(tokens a program, warps), as all of these: the fastest of those that were tried."""
_GATHERING = 1024
"""Programs of a gather that ends where a tensor says: as many as run at once. Not measured."""
_NARROW = (4, 4)
"""Not measured: as many bytes a thread as SGLang's kernel for the same."""


def quantize_reference(latents: torch.Tensor, rank: int) -> torch.Tensor:
    """Pack latents, with scales that are powers of two.

    Power-of-two scales make value = e4m3 * scale exact in bf16, and are the only ones that
    FlashMLA's SM100 kernel reads right (it truncates a scale to ue8m0).

    Args:
        latents: [tokens, rank + rope] bf16.
        rank: width of the quantized part, a multiple of 128.

    Returns:
        [tokens, rank + 4 * rank / 128 + 2 * rope] uint8.
    """
    tiles = latents[:, :rank].float().unflatten(-1, (-1, SCALE_TILE))
    largest = tiles.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    scales = torch.exp2(torch.ceil(torch.log2(largest / _E4M3_MAX)))
    values = (tiles / scales).to(torch.float8_e4m3fn).flatten(1)
    rope = latents[:, rank:].contiguous()
    parts = [values.view(torch.uint8), scales.flatten(1).view(torch.uint8), rope.view(torch.uint8)]
    return torch.cat(parts, dim=-1)


def dequantize_reference(
    pool: torch.Tensor, slots: torch.Tensor, rank: int, rope: int
) -> torch.Tensor:
    """`dequantize` in plain torch, on any device."""
    return _values(pool, slots, rank, rope).to(torch.bfloat16)


def _values(pool: torch.Tensor, slots: torch.Tensor, rank: int, rope: int) -> torch.Tensor:
    """[tokens, rank + rope] fp32: what the tokens stand for."""
    rows = pool[slots.long()]
    values = rows[:, :rank].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, rank : rank + 4 * (rank // SCALE_TILE)].contiguous().view(torch.float32)
    latent = values.unflatten(-1, (-1, SCALE_TILE)) * scales[..., None]
    tail = rows[:, -2 * rope :].contiguous().view(torch.bfloat16)
    return torch.cat((latent.flatten(1), tail.float()), dim=-1)


def narrow_reference(
    pool: torch.Tensor, slots: torch.Tensor, rank: int, rope: int, spare: int = 0
) -> torch.Tensor:
    """`narrow` in plain torch, on any device."""
    values = _values(pool, slots, rank, rope).clamp(-_E4M3_MAX, _E4M3_MAX)
    return torch.nn.functional.pad(values, (0, 0, 0, spare)).to(torch.float8_e4m3fn)


@triton.jit
def _dequantize_block(
    values, scales, tails, slots, out, first, tokens,
    TILES: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    # One row of the block is one scale tile of one token, so its scale is loaded once.
    row = tl.arange(0, TOKENS * TILES)
    token = first + row // TILES
    tile = row % TILES
    here = token < tokens
    # 64-bit: a pool of 4 million tokens passes 2**31 bytes.
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    value = tl.load(values + slot[:, None] * BYTES + column, mask=here[:, None], other=0.0)
    scale = tl.load(scales + slot * (BYTES // 4) + TILES * TILE // 4 + tile, mask=here, other=0.0)
    latent = value.to(tl.float32) * scale[:, None]
    width = TILES * TILE + ROPE
    start = out + token.to(tl.int64)[:, None] * width
    tl.store(start + column, latent.to(tl.bfloat16), mask=here[:, None])

    token = first + tl.arange(0, TOKENS)
    here = token < tokens
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)
    column = tl.arange(0, ROPE)[None, :]
    source = tails + slot[:, None] * (BYTES // 2) + (BYTES // 2 - ROPE)
    tail = tl.load(source + column, mask=here[:, None], other=0.0)
    start = out + token.to(tl.int64)[:, None] * width + TILES * TILE
    tl.store(start + column, tail, mask=here[:, None])


@triton.jit
def _dequantize_kernel(
    values, scales, tails, slots, out, tokens,
    TILES: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * TOKENS
    _dequantize_block(
        values, scales, tails, slots, out, first, tokens, TILES, TILE, ROPE, BYTES, TOKENS
    )


@triton.jit
def _dequantize_first_kernel(
    values, scales, tails, slots, out, count,
    TILES: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    BYTES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.load(count)
    for first in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        _dequantize_block(
            values, scales, tails, slots, out, first, tokens, TILES, TILE, ROPE, BYTES, TOKENS
        )


def dequantize(
    pool: torch.Tensor,
    slots: torch.Tensor,
    rank: int,
    rope: int,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather tokens of a paged pool and widen them to bf16, in one pass.

    Args:
        pool: [slots of the pool, bytes a token] uint8, contiguous.
        slots: [tokens] int32: page * page size + offset of each token.
        rank: quantized width, a multiple of 128.
        rope: bf16 width, a power of two.
        count: int32 [1] on the same device: only the first so many are gathered, and only they take
            time. So a CUDA graph gathers as many as a batch has. None: all.

    Returns:
        [tokens, rank + rope] bf16; behind `count` whatever the memory held.
    """
    tokens, width = slots.numel(), KVLayout.FP8_PACKED.token_bytes(rank, rope)
    assert pool.is_contiguous() and pool.shape[1] == width
    out = torch.empty(tokens, rank + rope, dtype=torch.bfloat16, device=pool.device)
    each, warps = _DEQUANTIZE
    programs = triton.cdiv(tokens, each)
    kernel, stop = (
        (_dequantize_kernel[(programs,)], tokens) if count is None
        else (_dequantize_first_kernel[(min(programs, _GATHERING),)], count)
    )  # fmt: skip
    kernel(
        pool.view(torch.float8_e4m3fn), pool.view(torch.float32), pool.view(torch.bfloat16),
        slots, out, stop,
        TILES=rank // SCALE_TILE, TILE=SCALE_TILE, ROPE=rope, BYTES=width, TOKENS=each,
        num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _narrow_kernel(
    values, scales, tails, slots, out, tokens, rows,
    TILES: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    BYTES: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # What is behind the tokens is loaded as zeros, and stored as such.
    width: tl.constexpr = TILES * TILE + ROPE
    row = tl.arange(0, TOKENS * TILES)
    token = tl.program_id(0) * TOKENS + row // TILES
    tile = row % TILES
    here = token < tokens
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    value = tl.load(values + slot[:, None] * BYTES + column, mask=here[:, None], other=0.0)
    scale = tl.load(scales + slot * (BYTES // 4) + TILES * TILE // 4 + tile, mask=here, other=0.0)
    latent = tl.clamp(value.to(tl.float32) * scale[:, None], -MOST, MOST)
    target = out + token.to(tl.int64)[:, None] * width + column
    narrow = on_e4m3_grid(latent).to(out.dtype.element_ty)
    tl.store(target, narrow, mask=(token < rows)[:, None])

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)
    column = tl.arange(0, ROPE)[None, :]
    source = tails + slot[:, None] * (BYTES // 2) + (BYTES // 2 - ROPE)
    tail = tl.load(source + column, mask=here[:, None], other=0.0).to(tl.float32)
    target = out + token.to(tl.int64)[:, None] * width + TILES * TILE + column
    narrow = on_e4m3_grid(tl.clamp(tail, -MOST, MOST)).to(out.dtype.element_ty)
    tl.store(target, narrow, mask=(token < rows)[:, None])


def narrow(
    pool: torch.Tensor, slots: torch.Tensor, rank: int, rope: int, spare: int = 0
) -> torch.Tensor:
    """Gather tokens of a paged pool as e4m3 without scales, in one pass: values are rounded again.

    Args:
        pool: [slots of the pool, bytes a token] uint8, contiguous.
        slots: [tokens] int32: page * page size + offset of each token.
        rank: quantized width, a multiple of 128.
        rope: bf16 width, a power of two.
        spare: rows of zeros behind the tokens.

    Returns:
        [tokens + spare, rank + rope] e4m3; what is beyond 448 becomes 448.
    """
    tokens, width = slots.numel(), KVLayout.FP8_PACKED.token_bytes(rank, rope)
    assert pool.is_contiguous() and pool.shape[1] == width
    rows = tokens + spare
    out = torch.empty(rows, rank + rope, dtype=torch.float8_e4m3fn, device=pool.device)
    each, warps = _NARROW
    _narrow_kernel[(triton.cdiv(rows, each),)](
        pool.view(torch.float8_e4m3fn), pool.view(torch.float32), pool.view(torch.bfloat16),
        slots, out, tokens, rows,
        TILES=rank // SCALE_TILE, TILE=SCALE_TILE, ROPE=rope, BYTES=width, TOKENS=each,
        MOST=_E4M3_MAX, num_warps=warps,
    )  # fmt: skip
    return out
