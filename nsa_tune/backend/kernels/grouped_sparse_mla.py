"""Sparse attention for few heads: neighbouring rows share one tile, over the union of their keys.

A tile of a matrix product has 64 rows on Hopper, and a rank has 8 to 32 heads. Instead of padding,
a tile takes the heads of several neighbouring query tokens and goes through the keys that any of
them selects. Each key says which of the tokens selected it; for others its weight is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
MOST_TOKENS = 8
"""A byte says which tokens of a tile selected a key."""
_MARK_BYTES = 2**28
"""Of marks at once: a byte for each slot and tile."""
_WORDS = 1024
_KEYS, _WARPS, _STAGES = 64, 8, 2
"""Keys of a step: the fastest of nine on an H200."""


@triton.jit
def _mark_kernel(indices, marks, rows, topk, words, TOKENS: tl.constexpr, KEYS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    slot = tl.load(indices + row * topk + column, mask=column < topk, other=-1)
    bit = tl.full([KEYS], 1, tl.int32) << ((slot % 4) * 8 + (row % TOKENS).to(tl.int32))
    tl.atomic_or(marks + row // TOKENS * words + slot // 4, bit, mask=slot >= 0, sem="relaxed")


@triton.jit
def _list_kernel(marks, slots, owners, counts, words, most, WORDS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, 4)
    count = 0
    for at in range(0, words, WORDS):
        word = at + tl.arange(0, WORDS)
        packed = tl.load(marks + group * words + word, mask=word < words, other=0)
        owner = tl.reshape((packed[:, None] >> (byte * 8)[None, :]) & 255, [WORDS * 4])
        slot = tl.reshape((word * 4)[:, None] + byte[None, :], [WORDS * 4])
        taken = (owner != 0).to(tl.int32)
        place = group * most + count + tl.cumsum(taken, 0) - taken
        tl.store(slots + place, slot, mask=taken != 0)
        tl.store(owners + place, owner.to(tl.uint8), mask=taken != 0)
        count += tl.sum(taken, 0)
    tl.store(counts + group, count)


@triton.jit
def _attend_kernel(
    q, pool, slots, owners, counts, mixed, rows, most, scale_log2,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    KEYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, TOKENS * HEADS)
    token = line // HEADS
    first = group * (TOKENS * HEADS)
    here = group * TOKENS + token < rows
    channel = tl.arange(0, RANK)
    turn = tl.arange(0, ROPE)
    start = q + (first + line)[:, None] * (RANK + ROPE)
    q_latent = tl.load(start + channel[None, :], mask=here[:, None], other=0.0).to(DOT)
    q_rope = tl.load(start + RANK + turn[None, :], mask=here[:, None], other=0.0).to(DOT)
    best = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    out = tl.zeros([TOKENS * HEADS, RANK], tl.float32)
    count = tl.load(counts + group)
    for at in range(0, count, KEYS):
        column = at + tl.arange(0, KEYS)
        listed = column < count
        # Behind the last key, slot 0 with no owner: any number there has a weight of 0.
        slot = tl.load(slots + group * most + column, mask=listed, other=0).to(tl.int64)
        owner = tl.load(owners + group * most + column, mask=listed, other=0).to(tl.int32)
        source = pool + slot[:, None] * (RANK + ROPE)
        latent = tl.load(source + channel[None, :]).to(DOT)
        rope = tl.load(source + RANK + turn[None, :]).to(DOT)
        score = tl.dot(q_latent, tl.trans(latent))
        score = tl.dot(q_rope, tl.trans(rope), score)
        selected = ((owner[None, :] >> token[:, None]) & 1) != 0
        score = tl.where(selected, score * scale_log2, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        # A row without any key so far keeps its weights at 0 instead of exp(-inf + inf).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weight, 1)
        out = tl.dot(weight.to(DOT), latent, out * fade[:, None])
        best = highest
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at = first + line
    tl.store(
        mixed + at[:, None] * RANK + channel[None, :], out.to(mixed.dtype.element_ty), here[:, None]
    )


def union_of(
    indices: torch.Tensor, tokens: int, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys that `tokens` neighbouring rows select together, without a wait for the device.

    Args:
        indices: [rows, topk] int32 slots below `slots`, -1 where empty; contiguous.
        tokens: rows of a group, up to 8.
        slots: of the pool.

    Returns:
        [groups, tokens * topk] int32 slots of a group, ascending; of each uint8 bits, the first
        for the group's first row; and [groups] int32 how many there are. Behind them, anything.
    """
    rows, topk = indices.shape
    device, groups, words = indices.device, triton.cdiv(rows, tokens), triton.cdiv(slots, 4)
    most = tokens * topk
    listed = torch.empty(groups, most, dtype=torch.int32, device=device)
    owners = torch.empty(groups, most, dtype=torch.uint8, device=device)
    counts = torch.empty(groups, dtype=torch.int32, device=device)
    step = max(_MARK_BYTES // (4 * words), 1)
    for first in range(0, groups, step):
        last = min(first + step, groups)
        part = indices[first * tokens : last * tokens]
        marks = torch.zeros(last - first, words, dtype=torch.int32, device=device)
        keys = min(triton.next_power_of_2(topk), 1024)
        _mark_kernel[(len(part), triton.cdiv(topk, keys))](
            part, marks, rows, topk, words, TOKENS=tokens, KEYS=keys, num_warps=4
        )
        _list_kernel[(last - first,)](
            marks, listed[first:last], owners[first:last], counts[first:last], words, most,
            WORDS=_WORDS, num_warps=8,
        )  # fmt: skip
    return listed, owners, counts


def grouped_sparse_mla(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, rank: int, tokens: int
) -> torch.Tensor:
    """Softmax attention of each row over its own selection, mixing latents; exact.

    Args:
        q: [rows, heads, rank + rope] bf16, contiguous: absorbed queries; heads a power of two.
        pool: [slots, rank + rope] bf16, contiguous. `rank` and rope are powers of two from 16.
        indices: [rows, topk] int32 slots, -1 where empty; contiguous. No row has one twice.
        scale: softmax scale.
        rank: width of the values.
        tokens: neighbouring rows of a tile, up to 8; times heads, a power of two from 16.

    Returns:
        [rows, heads, rank] bf16, zero in a row without any key.
    """
    rows, heads, width = q.shape
    lines = tokens * heads
    assert q.is_contiguous() and pool.is_contiguous() and indices.is_contiguous()
    assert tokens <= MOST_TOKENS and lines >= 16 and not lines & (lines - 1)
    listed, owners, counts = union_of(indices, tokens, len(pool))
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    _attend_kernel[(len(counts),)](
        q, pool, listed, owners, counts, out, rows, listed.shape[1], scale * _LOG2_E,
        HEADS=heads, TOKENS=tokens, RANK=rank, ROPE=width - rank, KEYS=_KEYS,
        # Triton's interpreter multiplies bf16 as if it were uint16.
        DOT=tl.float32 if q.device.type == "cpu" else tl.bfloat16,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out
