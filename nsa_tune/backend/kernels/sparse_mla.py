"""Sparse attention over absorbed latents, on any GPU: each row attends to the slots it names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_tune.backend.types.layouts import SCALE_TILE, KVLayout

_KEYS_PER_STEP = 32
_BIG_SHARED_MEMORY = 160 * 1024
_FEWEST_KEYS_PER_SPLIT = 128
_WAVES = 2
_LOG2_E = 1.4426950408889634


def sparse_mla_reference(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, rank: int
) -> torch.Tensor:
    """`sparse_mla` over bf16 latents in plain torch, all rows at once."""
    keys = latents[indices.clamp_min(0).long()].float()
    scores = torch.einsum("rhc,rkc->rhk", q.float(), keys) * scale
    weights = scores.masked_fill((indices < 0)[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("rhk,rkc->rhc", weights, keys[..., :rank]).to(q.dtype)


@triton.jit
def _e4m3(bits):
    # By hand, because GPUs before SM89 have no instruction for it: e4m3 bits are the top of an
    # fp32 whose exponent is 120 too small.
    wide = bits.to(tl.int32)
    small = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return small.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _attend_kernel(
    q, pool, scales, tails, indices, mixed, lse, heads, topk, scale_log2, per_split,
    RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr,
    PACKED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    # 64-bit: 32768 rows of 128 heads and 576 values pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    here = (head < heads)[:, None]
    channel = tl.arange(0, RANK)
    turn = tl.arange(0, ROPE)
    start = q + (row * heads + head)[:, None] * (RANK + ROPE)
    q_latent = tl.load(start + channel[None, :], mask=here, other=0.0).to(DOT)
    q_rope = tl.load(start + RANK + turn[None, :], mask=here, other=0.0).to(DOT)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, RANK], tl.float32)
    for at in range(split * per_split, min((split + 1) * per_split, topk), KEYS):
        column = at + tl.arange(0, KEYS)
        slot = tl.load(indices + row * topk + column, mask=column < topk, other=-1)
        seen = slot >= 0
        given = seen[:, None]
        slot = tl.where(seen, slot, 0).to(tl.int64)[:, None]
        if PACKED:
            bits = tl.load(pool + slot * BYTES + channel[None, :], mask=given, other=0)
            step = scales + slot * (BYTES // 4) + RANK // 4 + (channel // TILE)[None, :]
            latent = (_e4m3(bits) * tl.load(step, mask=given, other=0.0)).to(DOT)
            tail = tails + slot * (BYTES // 2) + (BYTES // 2 - ROPE) + turn[None, :]
        else:
            source = pool + slot * (RANK + ROPE)
            latent = tl.load(source + channel[None, :], mask=given, other=0.0).to(DOT)
            tail = source + RANK + turn[None, :]
        rope = tl.load(tail, mask=given, other=0.0).to(DOT)
        score = tl.dot(q_latent, tl.trans(latent))
        score += tl.dot(q_rope, tl.trans(rope))
        score = tl.where(seen[None, :], score * scale_log2, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        # A row without any key so far keeps its weights at 0 instead of exp(-inf + inf).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weight, 1)
        out = out * fade[:, None] + tl.dot(weight.to(DOT), latent)
        best = highest
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at = (row * heads + head) * SPLITS + split
    tl.store(mixed + at[:, None] * RANK + channel[None, :], out.to(mixed.dtype.element_ty), here)
    if SPLITS > 1:
        some = total > 0
        share = best + tl.log2(tl.where(some, total, 1.0))
        tl.store(lse + at, tl.where(some, share, float("-inf")), mask=head < heads)


@triton.jit
def _combine_kernel(partial, lse, out, SPLITS: tl.constexpr, RANK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, RANK)
    share = tl.load(lse + row * SPLITS + split)
    highest = tl.max(share, 0)
    share = tl.exp2(share - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(share, 0)
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * RANK + channel[None, :])
    mixed = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * RANK + channel, mixed.to(out.dtype.element_ty))


def sparse_mla(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, rank: int
) -> torch.Tensor:
    """Softmax attention of each row over its own selection, mixing latents.

    Args:
        q: [rows, heads, rank + rope] bf16, contiguous: absorbed queries.
        pool: [slots, rank + rope] bf16, or [slots, bytes a token] uint8 in the packed fp8 layout;
            contiguous. `rank` and rope are powers of two from 16.
        indices: [rows, topk] int32 slots, -1 where empty; contiguous.
        scale: softmax scale.
        rank: width of the values.

    Returns:
        [rows, heads, rank] bf16; zero in a row without any key.
    """
    rows, heads, width = q.shape
    rope, topk = width - rank, indices.shape[1]
    packed = pool.dtype == torch.uint8
    assert q.is_contiguous() and pool.is_contiguous() and indices.is_contiguous()
    each = KVLayout.FP8_PACKED.token_bytes(rank, rope) if packed else width
    assert pool.shape[1] == each
    block, stages, warps, sms = _configuration(q.device, heads)
    blocks = triton.cdiv(heads, block)
    splits = _splits(rows * blocks, topk, sms)
    per_split = triton.cdiv(triton.cdiv(topk, splits), _KEYS_PER_STEP) * _KEYS_PER_STEP
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    mixed, lse = out, out
    if splits > 1:
        mixed = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    _attend_kernel[(rows, blocks, splits)](
        q, pool, pool.view(torch.float32) if packed else pool,
        pool.view(torch.bfloat16) if packed else pool, indices, mixed, lse, heads, topk,
        scale * _LOG2_E, per_split,
        RANK=rank, ROPE=rope, TILE=SCALE_TILE, BYTES=each, PACKED=packed, HEADS=block,
        KEYS=_KEYS_PER_STEP, SPLITS=splits,
        # Triton's interpreter multiplies bf16 as if it were uint16.
        DOT=tl.float32 if q.device.type == "cpu" else tl.bfloat16,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(rows * heads,)](mixed, lse, out, SPLITS=splits, RANK=rank, num_warps=4)
    return out


def _configuration(device: torch.device, heads: int) -> tuple[int, int, int, int]:
    """(heads a program, stages, warps, SMs), by what fits into a block's shared memory."""
    if device.type == "cpu":
        return 16, 1, 4, 8
    properties = torch.cuda.get_device_properties(device)
    # In mypy's stubs the attribute is missing.
    roomy = getattr(properties, "shared_memory_per_block_optin", 0) >= _BIG_SHARED_MEMORY
    sms = properties.multi_processor_count
    if heads > 32 and roomy:
        return 64, 2, 8, sms
    if heads > 16 and roomy:
        return 32, 2, 8, sms
    return 16, 2 if roomy else 1, 4, sms


def _splits(programs: int, topk: int, sms: int) -> int:
    """Parts of a row's selection that fill the device, a power of two."""
    wanted = min(_WAVES * sms // max(programs, 1), topk // _FEWEST_KEYS_PER_SPLIT)
    return 1 << (max(wanted, 1).bit_length() - 1)
