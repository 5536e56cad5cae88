"""DeepSeek V4's KV layout (584 bytes a token, a page as a structure of arrays): quantize,
dequantize, paged gather.

A page holds every token's row of `rank` e4m3 and `rope` bf16 values, then every token's ue8m0
scales, one for 64 values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_tune.backend.types.layouts import V4_SCALE_TILE, KVLayout

_E4M3_MAX = 448.0
_SMALLEST = 1e-8
"""The least magnitude that a scale is made for, so that a tile of zeros has one."""
_BIAS = 127
_DEQUANTIZE = (8, 2)
"""(tokens a program, warps): the fastest of those that were tried."""


def empty_pool(
    pages: int, page_size: int, rank: int, rope: int, device: torch.device
) -> torch.Tensor:
    """A pool [pages, bytes a page] uint8 of zeros: every token is zero, and no byte is NaN."""
    width = KVLayout.V4_PAGED.page_bytes(rank, rope, page_size)
    return torch.zeros(pages, width, dtype=torch.uint8, device=device)


def rows_of(pool: torch.Tensor, page_size: int, rank: int, rope: int) -> torch.Tensor:
    """The pool as FlashMLA takes it: [pages, page size, 1, bytes a token], without a copy.

    A row of this view is no token: a page's rows come first and all its scales after them.
    """
    each = KVLayout.V4_PAGED.token_bytes(rank, rope)
    return pool[:, : page_size * each].view(pool.shape[0], page_size, 1, each)


def quantize(
    latents: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, page_size: int, rank: int
) -> None:
    """Write tokens into their slots of a paged pool: byte = 127 + ceil(log2(max |x| / 448)).

    Args:
        latents: [tokens, rank + rope] bf16.
        slots: [tokens], all different.
        pool: [pages, bytes a page] uint8; written.
        page_size: tokens a page.
        rank: quantized width, a multiple of 64.
    """
    tiles = latents[:, :rank].float().unflatten(-1, (-1, V4_SCALE_TILE))
    largest = tiles.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    exponents = torch.ceil(torch.log2(largest / _E4M3_MAX))
    values = (tiles * torch.exp2(-exponents)).to(torch.float8_e4m3fn).flatten(1)
    rope = latents[:, rank:].contiguous()
    rows = torch.cat((values.view(torch.uint8), rope.view(torch.uint8)), dim=1)
    scales = (exponents + _BIAS).to(torch.uint8).flatten(1)
    row, scale = _places(slots, page_size, rank, rope.shape[1])
    page = (slots.long() // page_size)[:, None]
    pool[page, row[:, None] + torch.arange(rows.shape[1], device=pool.device)] = rows
    pool[page, scale[:, None] + torch.arange(scales.shape[1], device=pool.device)] = scales


def dequantize_reference(
    pool: torch.Tensor, slots: torch.Tensor, page_size: int, rank: int, rope: int
) -> torch.Tensor:
    """`dequantize` in plain torch, on any device."""
    row, scale = _places(slots, page_size, rank, rope)
    page = (slots.long() // page_size)[:, None]
    rows = pool[page, row[:, None] + torch.arange(rank + 2 * rope, device=pool.device)]
    tiles = torch.arange(rank // V4_SCALE_TILE, device=pool.device)
    exponents = pool[page, scale[:, None] + tiles].float() - _BIAS
    values = rows[:, :rank].contiguous().view(torch.float8_e4m3fn).float()
    latent = values.unflatten(-1, (-1, V4_SCALE_TILE)) * torch.exp2(exponents)[..., None]
    tail = rows[:, rank:].contiguous().view(torch.bfloat16)
    return torch.cat((latent.flatten(1).to(torch.bfloat16), tail), dim=-1)


def _places(
    slots: torch.Tensor, page_size: int, rank: int, rope: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte in its page at which each slot's row begins, and its scales. Both [tokens] int64."""
    width = rank + 2 * rope
    padded = KVLayout.V4_PAGED.token_bytes(rank, rope) - width
    offset = slots.long() % page_size
    return offset * width, page_size * width + offset * padded


@triton.jit
def _dequantize_kernel(
    values, tails, scales, slots, out, tokens, page_bytes, page_halves, page_size, stride,
    TILES: tl.constexpr, TILES_UP: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    SCALES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = TILES * TILE + 2 * ROPE
    # One row of the block is one scale tile of one token, so its scale is loaded once.
    row = tl.arange(0, TOKENS * TILES_UP)
    token = tl.program_id(0) * TOKENS + row // TILES_UP
    tile = row % TILES_UP
    here = (token < tokens) & (tile < TILES)
    slot = tl.load(slots + token, mask=here, other=0)
    # 64-bit: a pool of 4 million tokens passes 2**31 bytes.
    page = (slot // page_size).to(tl.int64) * page_bytes
    offset = slot % page_size
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    start = (page + offset * ROW)[:, None]
    value = tl.load(values + start + column, mask=here[:, None], other=0.0)
    place = scales + page + page_size * ROW + offset * SCALES + tile
    biased = tl.load(place, mask=here, other=0).to(tl.int32)
    # A ue8m0 value is the exponent field of the fp32 power of two. Only 0, 2**-127, has none, and
    # no latent is as small as that.
    power = (biased << 23).to(tl.float32, bitcast=True)
    latent = value.to(tl.float32) * power[:, None]
    target = out + token.to(tl.int64)[:, None] * stride
    tl.store(target + column, latent.to(tl.bfloat16), mask=here[:, None])

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    slot = tl.load(slots + token, mask=here, other=0)
    # In bf16 values, by a product of its own: of a quotient the compiler knows no alignment.
    page = (slot // page_size).to(tl.int64) * page_halves
    start = page + (slot % page_size) * (ROW // 2) + TILES * TILE // 2
    column = tl.arange(0, ROPE)[None, :]
    tail = tl.load(tails + start[:, None] + column, mask=here[:, None], other=0.0)
    target = out + token.to(tl.int64)[:, None] * stride + TILES * TILE
    tl.store(target + column, tail, mask=here[:, None])


def dequantize(
    pool: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    rank: int,
    rope: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather tokens of a paged pool and widen them to bf16, in one pass.

    Args:
        pool: [pages, bytes a page] uint8, contiguous.
        slots: [tokens] int32: page * page size + offset of each token.
        page_size: tokens a page.
        rank: quantized width, a multiple of 64.
        rope: bf16 width, a power of two.
        out: [tokens, rank + rope] bf16 to write, rows contiguous; a part of a workspace will do.

    Returns:
        [tokens, rank + rope] bf16: `out`, or a new tensor.
    """
    tokens, layout = slots.numel(), KVLayout.V4_PAGED
    assert pool.is_contiguous()
    assert pool.shape[1] == layout.page_bytes(rank, rope, page_size)
    if out is None:
        out = torch.empty(tokens, rank + rope, dtype=torch.bfloat16, device=pool.device)
    assert out.shape == (tokens, rank + rope) and out.stride(1) == 1
    if not tokens:
        return out
    each, warps = _DEQUANTIZE
    tiles = rank // V4_SCALE_TILE
    _dequantize_kernel[(triton.cdiv(tokens, each),)](
        pool.view(torch.float8_e4m3fn), pool.view(torch.bfloat16), pool, slots, out,
        tokens, pool.shape[1], pool.shape[1] // 2, page_size, out.stride(0),
        TILES=tiles, TILES_UP=triton.next_power_of_2(tiles), TILE=V4_SCALE_TILE, ROPE=rope,
        SCALES=layout.token_bytes(rank, rope) - rank - 2 * rope, TOKENS=each, num_warps=warps,
    )  # fmt: skip
    return out
