"""Sparse decode attention over a bf16 pool, each row's selection split among many programs.

For few rows of few heads, where launching and waiting take longer than reading: slots are read a
step ahead of the latents that they name, and the merging kernel is set up while the first runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

_LOG2_E = 1.4426950408889634
_CHANNELS = 128
"""Channels that a merging program writes."""
_WAVES = 2
_KEYS, _STAGES, _WARPS = 32, 3, 4
_MOST_SPLITS = 32
_MOST_SPLITS_ALONE = 64
"""For programs so few that merging costs less than they save."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a call is cut up."""

    heads: int
    """Heads of a program, a power of two from 16."""
    keys: int
    """Keys of a step."""
    splits: int
    """Programs that share a row's selection, a power of two."""
    warps: int
    stages: int


@triton.jit
def _attend_kernel(
    q, q_rope, pool, indices, mixed, lse, heads, topk, scale_log2, splits, per_split,
    row_stride, head_stride, rope_row_stride, rope_head_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    here = head < heads
    channel = tl.arange(0, RANK)
    turn = tl.arange(0, ROPE)
    key = tl.arange(0, KEYS)
    first = split * per_split
    last = min(first + per_split, topk)
    own = indices + row * topk
    # Slots are read a step ahead: latents then never wait for them.
    slot = tl.load(own + first + key, mask=first + key < last, other=-1)
    latent_at = q + row * row_stride + head[:, None] * head_stride
    rope_at = q_rope + row * rope_row_stride + head[:, None] * rope_head_stride
    own_latent = tl.load(latent_at + channel[None, :], mask=here[:, None], other=0.0).to(DOT)
    own_rope = tl.load(rope_at + turn[None, :], mask=here[:, None], other=0.0).to(DOT)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, RANK], tl.float32)
    for at in tl.range(first, last, KEYS, num_stages=STAGES):
        seen = slot >= 0
        source = pool + tl.where(seen, slot, 0).to(tl.int64)[:, None] * (RANK + ROPE)
        latent = tl.load(source + channel[None, :], mask=seen[:, None], other=0.0).to(DOT)
        rope = tl.load(source + RANK + turn[None, :], mask=seen[:, None], other=0.0).to(DOT)
        column = at + KEYS + key
        slot = tl.load(own + column, mask=column < last, other=-1)
        score = tl.dot(own_latent, tl.trans(latent))
        score = tl.dot(own_rope, tl.trans(rope), score)
        score = tl.where(seen[None, :], score * scale_log2, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        # A row without any key so far keeps its weights at 0 instead of exp(-inf + inf).
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weight, 1)
        out = tl.dot(weight.to(DOT), latent, out * fade[:, None])
        best = highest
    if EARLY:
        # The merging kernel may be set up meanwhile; it waits for this one's end.
        cuda.gdc_launch_dependents()
    some = total > 0
    whole = tl.where(some, total, 1.0)
    at = (row * heads + head) * splits + split
    place = mixed + at[:, None] * RANK + channel[None, :]
    tl.store(place, (out / whole[:, None]).to(mixed.dtype.element_ty), mask=here[:, None])
    if SPLIT:
        tl.store(lse + at, tl.where(some, best + tl.log2(whole), float("-inf")), mask=here)


@triton.jit
def _merge_kernel(
    partial, lse, out,
    SPLITS: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    share = tl.load(lse + row * SPLITS + split)
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * RANK + channel[None, :])
    highest = tl.max(share, 0)
    share = tl.exp2(share - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(share, 0)
    mixed = tl.sum(parts.to(tl.float32) * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * RANK + channel, mixed.to(out.dtype.element_ty))


def split_sparse_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    rank: int,
    shape: Shape | None = None,
) -> torch.Tensor:
    """`split_sparse_mla_parts` with both parts of the queries in one tensor."""
    return split_sparse_mla_parts(q[..., :rank], q[..., rank:], pool, indices, scale, shape)


def split_sparse_mla_parts(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Softmax attention of each row over its own selection, mixing latents; absorbed queries come
    in two parts, as engines have them.

    Args:
        q: [rows, heads, rank] bf16; each head's values lie one behind the other.
        q_rope: [rows, heads, rope] bf16, likewise.
        pool: [slots, rank + rope] bf16, contiguous. `rank` and rope are powers of two from 16.
        indices: [rows, topk] int32 slots, -1 where empty; contiguous.
        scale: softmax scale.
        shape: how to cut it up; by default what was measured best on an H200.

    Returns:
        [rows, heads, rank] bf16, contiguous; zero in a row without any key.
    """
    rows, heads, rank = q.shape
    topk, width = indices.shape[1], rank + q_rope.shape[2]
    assert q.stride(2) == 1 and q_rope.stride(2) == 1
    assert pool.is_contiguous() and indices.is_contiguous() and pool.shape[1] == width
    cut = shape or shape_of(rows, heads, topk, _sms(q.device))
    blocks, splits = triton.cdiv(heads, cut.heads), cut.splits
    per_split = triton.cdiv(triton.cdiv(topk, splits), cut.keys) * cut.keys
    early = splits > 1 and _can_set_up_early(q.device)
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    mixed, lse = out, out
    if splits > 1:
        mixed = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    _attend_kernel[(rows, blocks, splits)](
        q, q_rope, pool, indices, mixed, lse, heads, topk, scale * _LOG2_E, splits, per_split,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
        RANK=rank, ROPE=width - rank, HEADS=cut.heads, KEYS=cut.keys, SPLIT=splits > 1,
        STAGES=cut.stages, EARLY=early,
        # Triton's interpreter multiplies bf16 as if it were uint16.
        DOT=tl.float32 if q.device.type == "cpu" else tl.bfloat16,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        channels = min(_CHANNELS, rank)
        _merge_kernel[(rows * heads, rank // channels)](
            mixed, lse, out, SPLITS=splits, RANK=rank, CHANNELS=channels, EARLY=early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out


def _sms(device: torch.device) -> int:
    if device.type == "cpu":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _can_set_up_early(device: torch.device) -> bool:
    """Whether one kernel may be launched while the one before it runs: since SM90."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def shape_of(rows: int, heads: int, topk: int, sms: int) -> Shape:
    """How `split_sparse_mla` cuts up a batch by default."""
    block = 16
    programs = rows * triton.cdiv(heads, block)
    most = _MOST_SPLITS_ALONE if programs <= 2 else _MOST_SPLITS
    wanted = max(min(_WAVES * sms // programs, triton.cdiv(topk, _KEYS), most), 1)
    return Shape(block, _KEYS, 1 << (wanted.bit_length() - 1), _WARPS, _STAGES)
