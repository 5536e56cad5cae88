"""Which selected keys neighbouring queries share: lists of those of all, of a pair, and of one.

Attention over the keys that several queries share computes their heads in one tile instead of
padding each query's. CUDA, because a key is found in a table in shared memory.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from nsa_tune.backend.kernels.launch import Kernel, Launch

MOST_KEYS = 2048
"""Of a selection: four of them fill two thirds of the table."""
_STEP = 128
"""Lists are filled up with -1 to a multiple of what FlashMLA reads at once."""
_THREADS = 512
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_PARAMETERS = "PPPPPPPiii"

SOURCE = r"""
#define WARPS (THREADS / 32)
#define PLACES 11776
#define FREE 0xffffffffu

__device__ __forceinline__ unsigned place_of(int key) {
  return __umulhi((unsigned)key * 2654435769u, PLACES);
}

// The table's word of a key: the key, and which queries selected it.
__device__ __forceinline__ void insert(unsigned* table, int key, unsigned bit) {
  unsigned place = place_of(key);
  while (true) {
    unsigned old = atomicCAS(&table[place], FREE, ((unsigned)key << 4) | bit);
    if (old == FREE) return;
    if ((int)(old >> 4) == key) { atomicOr(&table[place], bit); return; }
    place = place + 1 == PLACES ? 0 : place + 1;
  }
}

__device__ __forceinline__ unsigned find(const unsigned* table, int key) {
  unsigned place = place_of(key);
  while ((int)(table[place] >> 4) != key) place = place + 1 == PLACES ? 0 : place + 1;
  return table[place] & 15u;
}

extern "C" __global__ void __launch_bounds__(THREADS) shared_keys(
    const int* indices, int* ones, int* pairs, int* alls, int* one_counts, int* pair_counts,
    int* all_counts, int rows, int topk, int steps) {
  __shared__ unsigned table[PLACES];
  __shared__ int counts[WARPS][3];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;
  for (int i = threadIdx.x; i < PLACES; i += THREADS) table[i] = FREE;
  __syncthreads();
  for (int token = 0; token < TOKENS; ++token) {
    const long long row = (long long)group * TOKENS + token;
    if (row >= rows) break;
    for (int column = threadIdx.x; column < topk; column += THREADS) {
      int key = indices[row * topk + column];
      if (key >= 0) insert(table, key, 1u << token);
    }
  }
  __syncthreads();
  for (int token = 0; token < TOKENS; ++token) {
    const long long row = (long long)group * TOKENS + token;
    const unsigned both = 3u << (token & ~1), every = (1u << TOKENS) - 1;
    int* lists[3] = {ones + row * topk, pairs + (row / 2) * topk, alls + (long long)group * topk};
    int* totals[3] = {one_counts + row, pair_counts + row / 2, all_counts + group};
    // What a list shared by several queries has is written by the first of them.
    const bool writes[3] = {true, token % 2 == 0, token == 0};
    int keys[PER], kinds[PER], mine[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int column = (warp * steps + i) * 32 + lane;
      const bool inside = i < steps && column < topk && row < rows;
      keys[i] = inside ? indices[row * topk + column] : -1;
      kinds[i] = -1;
      if (keys[i] >= 0) {
        const unsigned owners = find(table, keys[i]);
        kinds[i] = TOKENS > 2 && owners == every ? 2 : (owners & both) == both ? 1 : 0;
      }
#pragma unroll
      for (int kind = 0; kind < 3; ++kind)
        mine[kind] += __popc(__ballot_sync(0xffffffffu, kinds[i] == kind));
    }
    if (lane < 3) counts[warp][lane] = lane == 0 ? mine[0] : lane == 1 ? mine[1] : mine[2];
    __syncthreads();
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
      if (!writes[kind] || (kind == 2 && TOKENS == 2)) continue;
      int place = 0, total = 0;
      for (int other = 0; other < WARPS; ++other) {
        if (other < warp) place += counts[other][kind];
        total += counts[other][kind];
      }
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const unsigned those = __ballot_sync(0xffffffffu, kinds[i] == kind);
        if (kinds[i] == kind) lists[kind][place + __popc(those & ((1u << lane) - 1))] = keys[i];
        place += __popc(those);
      }
      // An empty list has one key that is none.
      const int end = min((total + STEP - 1) / STEP * STEP + (total == 0) * STEP, topk);
      for (int at = total + threadIdx.x; at < end; at += THREADS) lists[kind][at] = -1;
      if (threadIdx.x == 0) *totals[kind] = max(total, 1);
    }
    __syncthreads();
  }
}
"""


@dataclass(frozen=True, slots=True)
class Shared:
    """Keys by how many of neighbouring queries select them; each key of a query is in one list."""

    tokens: int
    """Neighbouring queries of a list: 1, 2 or 4."""
    keys: torch.Tensor
    """[lists, topk] int32, -1 from `counts` up to a multiple of 128; behind that, anything."""
    counts: torch.Tensor
    """[lists] int32, 1 at least: an empty list begins with -1."""


def _lists(rows: int, topk: int, tokens: int, device: torch.device) -> list[Shared]:
    """Lists with room, for whole groups of `tokens`."""
    groups = -(-rows // tokens)
    sizes = [size for size in (1, 2, 4) if size <= tokens]
    return [
        Shared(
            size,
            torch.empty(groups * tokens // size, topk, dtype=torch.int32, device=device),
            torch.empty(groups * tokens // size, dtype=torch.int32, device=device),
        )
        for size in sizes
    ]


@cache
def _kernel(tokens: int) -> Kernel:
    per = MOST_KEYS // _THREADS
    defines = f"#define THREADS {_THREADS}\n#define TOKENS {tokens}\n#define PER {per}\n"
    return Kernel(f"{defines}#define STEP {_STEP}\n{SOURCE}", "shared_keys", _PARAMETERS)


def shared_keys(indices: torch.Tensor, tokens: int) -> list[Shared]:
    """Split the selections of each `tokens` neighbouring rows by who shares their keys.

    Args:
        indices: [rows, topk] int32, contiguous, below 2**27; -1 where empty. No row has one twice,
            and topk is at most 2048, a multiple of 128.
        tokens: 2 or 4.

    Returns:
        The lists of single queries, of pairs, and with 4 `tokens` of all four. Those behind the
        last row are empty.
    """
    rows, topk = indices.shape
    assert indices.is_contiguous() and topk <= MOST_KEYS and topk % _STEP == 0
    if indices.device.type == "cpu":
        return shared_keys_reference(indices, tokens)
    lists = _lists(rows, topk, tokens, indices.device)
    parts = [*lists, lists[-1]][:3]
    pointers = [part.keys.data_ptr() for part in parts] + [part.counts.data_ptr() for part in parts]
    given = (indices.data_ptr(), *pointers, rows, topk, -(-topk // _THREADS))
    Launch(_kernel(tokens), len(lists[-1].keys), _THREADS, given)()
    return lists


def shared_keys_reference(indices: torch.Tensor, tokens: int) -> list[Shared]:
    """`shared_keys` in plain Python."""
    lists = _lists(len(indices), indices.shape[1], tokens, indices.device)
    selected = [[key for key in row if key >= 0] for row in indices.tolist()]
    selected += [[]] * (len(lists[0].keys) - len(selected))
    for part in reversed(lists):
        for place in range(len(part.keys)):
            rows = range(place * part.tokens, (place + 1) * part.tokens)
            shared = set.intersection(*(set(selected[row]) for row in rows))
            keys = [key for key in selected[rows[0]] if key in shared]
            part.keys[place] = -1
            part.keys[place, : len(keys)] = torch.tensor(keys, dtype=torch.int32)
            part.counts[place] = max(len(keys), 1)
            for row in rows:
                selected[row] = [key for key in selected[row] if key not in shared]
    return lists


@triton.jit
def _merge_kernel(
    ones, pairs, alls, one_lse, pair_lse, all_lse, one_keys, pair_keys, all_keys, out, topk,
    HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, RANK)[None, :]
    one = token * TILE + head
    pair = token // 2 * TILE + token % 2 * HEADS + head
    every = token // TOKENS * TILE + token % TOKENS * HEADS + head
    a, b = tl.load(one_lse + one), tl.load(pair_lse + pair)
    a = tl.where(tl.load(one_keys + token * topk) >= 0, a, float("-inf"))
    b = tl.where(tl.load(pair_keys + token // 2 * topk) >= 0, b, float("-inf"))
    most = tl.maximum(a, b)
    c = most
    if TOKENS > 2:
        c = tl.load(all_lse + every)
        c = tl.where(tl.load(all_keys + token // TOKENS * topk) >= 0, c, float("-inf"))
        most = tl.maximum(most, c)
    most = tl.where(most == float("-inf"), 0.0, most)
    a, b = tl.exp2(a - most)[:, None], tl.exp2(b - most)[:, None]
    total = a + b
    # What has no keys may hold anything, and 0 times that need not be 0.
    mixed = tl.where(a > 0, tl.load(ones + one[:, None] * RANK + channel).to(tl.float32) * a, 0.0)
    other = tl.load(pairs + pair[:, None] * RANK + channel).to(tl.float32)
    mixed += tl.where(b > 0, other * b, 0.0)
    if TOKENS > 2:
        c = tl.exp2(c - most)[:, None]
        total += c
        other = tl.load(alls + every[:, None] * RANK + channel).to(tl.float32)
        mixed += tl.where(c > 0, other * c, 0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)
    at = (token * HEADS + head)[:, None] * RANK + channel
    tl.store(out + at, mixed.to(out.dtype.element_ty))


def merge_shared(
    lists: list[Shared],
    outputs: list[torch.Tensor],
    lses: list[torch.Tensor],
    rows: int,
    heads: int,
) -> torch.Tensor:
    """Attention of each query over all its keys, from that over each list.

    Args:
        lists: of `shared_keys`.
        outputs: of each part [lists, tile, rank] bf16, contiguous; the heads of a list's queries
            come first in its tile, one query's behind the other's.
        lses: likewise [lists, tile] fp32: log2 of the sums of exponentials.
        rows: queries.
        heads: of each query, a power of two.

    Returns:
        [rows, heads, rank] bf16; zero for a query without keys.
    """
    if outputs[0].device.type == "cpu" and not _INTERPRETED:
        return merge_shared_reference(lists, outputs, lses, rows, heads)
    tile, rank = outputs[0].shape[1:]
    out = torch.empty(rows, heads, rank, dtype=outputs[0].dtype, device=outputs[0].device)
    keys = [part.keys for part in lists]
    # With two queries there is no third part: what is given for it is not read.
    given = [tensor for part in (outputs, lses, keys) for tensor in [*part, part[-1]][:3]]
    _merge_kernel[(rows,)](
        *given, out, keys[0].shape[1], HEADS=heads, TILE=tile, TOKENS=lists[-1].tokens, RANK=rank,
        num_warps=8,
    )  # fmt: skip
    return out


def merge_shared_reference(
    lists: list[Shared],
    outputs: list[torch.Tensor],
    lses: list[torch.Tensor],
    rows: int,
    heads: int,
) -> torch.Tensor:
    """`merge_shared` in plain torch."""
    mixed, shares = [], []
    for part, output, lse in zip(lists, outputs, lses, strict=True):
        per_query = part.tokens * heads
        empty = (part.keys[:, :1] < 0).expand(-1, per_query)
        share = lse[:, :per_query].masked_fill(empty, -torch.inf)
        shares.append(share.reshape(-1, heads)[:rows])
        values = output[:, :per_query].float().masked_fill(empty[..., None], 0.0)
        mixed.append(values.reshape(-1, heads, output.shape[-1])[:rows])
    weights = (torch.stack(shares) * math.log(2)).softmax(0).nan_to_num(0.0)
    return (torch.stack(mixed) * weights[..., None]).sum(0).to(outputs[0].dtype)
