"""The largest scores of each row, exactly, in little more than one reading of the row: CUDA.

A sample of the row says how large a score must be for somewhat more than enough to be as large.
Those are listed in shared memory in one reading, and the ones to take are found among them. Where
the sample misled, the threshold is corrected and the row read again, from the L2 by then. A short
row needs no sample: it is read once into registers, and counted into bins.

In Triton the same took three times as long: without shared memory each score's place in the list
takes a scan over the tile. PyTorch compiles the source by NVRTC, which it brings along, when a
shape is first asked for; that must not be within a graph's capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from nsa_tune.backend.kernels.launch import Kernel, Launch, compile_soon
from nsa_tune.backend.kernels.topk_transform import Kind, Transform

_FEW_ROWS = 264
"""Two for each SM: fewer rows leave threads over."""
_ROOM, _SHORT = 4096, 8192
MOST = _ROOM // 2
"""Scores that can be selected."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a row is read."""

    threads: int
    blocks: int
    """Blocks that an SM should hold at once."""
    sample: int
    room: int
    """Scores that can be listed; about 1.4 times as many as are wanted usually are."""
    short: int = 0
    """Rows of up to so many scores are held in registers; a multiple of `threads`, or 0."""


SOURCE = r"""
#define NONE (-0x7fffffff)  // below every score's key
#define BINS 512
#define LANES (THREADS < 32 ? THREADS : 32)

__device__ __forceinline__ int key_of(float score) {
  // Keys order as integers what scores order as numbers; adding 0 makes one zero of two.
  int bits = __float_as_int(score + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float score_of(int key) {
  return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
}

__device__ __forceinline__ int middle_of(int low, int high) {
  return (low & high) + ((low ^ high) >> 1);
}

// How far from where `most` are as large to where `fewest` are lies where `aim` are, if they thin
// out evenly.
__device__ __forceinline__ float thinned(float most, float aim, float fewest) {
  return __logf(most / aim) / __logf(most / fmaxf(fewest, 0.5f));
}

// Sum over the block. Three totals in turn, so that one barrier is enough.
__device__ __forceinline__ int summed(int mine, int* totals, int& turn) {
  mine = __reduce_add_sync(0xffffffffu, mine);
  int now = turn % 3, next = (turn + 1) % 3;
  if ((threadIdx.x & 31) == 0) atomicAdd(&totals[now], mine);
  if (threadIdx.x == 0) totals[next] = 0;
  __syncthreads();
  ++turn;
  return totals[now];
}

// How many scores stand before the first that lies on 16 bytes.
__device__ __forceinline__ int head_of(const float* source, int length) {
  int head = (int)((16 - ((unsigned long long)source & 15)) & 15) / 4;
  return head < length ? head : length;
}

// Lists the scores that are as large as `least`; counts also what no longer fits.
__device__ __forceinline__ void list_row(const float* source, int length, float least, int2* list,
                                         int* listed) {
  const unsigned all = 0xffffffffu;
  const int thread = threadIdx.x, lane = thread & 31, head = head_of(source, length);
  const float4* body = reinterpret_cast<const float4*>(source + head);
  const int quads = (length - head) / 4, rest = length - head - 4 * quads;
  for (int i = thread; i < head + rest; i += THREADS) {
    int at = i < head ? i : 4 * quads + i;
    float score = source[at];
    if (score >= least) {
      int spot = atomicAdd(listed, 1);
      if (spot < ROOM) list[spot] = make_int2(__float_as_int(score), at);
    }
  }
  // All threads of a warp stay to the end: they add up what they found.
  for (int i = thread; i - lane < quads; i += 4 * THREADS) {
    float score[16];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float none = __int_as_float(0x7fffffff);
      float4 four = make_float4(none, none, none, none);
      if (i + j * THREADS < quads) four = __ldg(body + i + j * THREADS);
      score[4 * j] = four.x;
      score[4 * j + 1] = four.y;
      score[4 * j + 2] = four.z;
      score[4 * j + 3] = four.w;
    }
    int own = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) own += score[j] >= least;
    int before = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int left = __shfl_up_sync(all, before, d);
      if (lane >= d) before += left;
    }
    int total = __shfl_sync(all, before, 31), base = 0;
    if (total == 0) continue;
    if (lane == 0) base = atomicAdd(listed, total);
    base = __shfl_sync(all, base, 0);
    if (base + total > ROOM) continue;
    int2* spot = list + base + before - own;
    int at = head + 4 * i;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (score[j] >= least) {
        *spot++ = make_int2(__float_as_int(score[j]), at + (j >> 2) * 4 * THREADS + (j & 3));
      }
    }
  }
}

// What a row's places become: where the table has their pages, or the place and something.
struct Row {
  const int* pages;
  int offset, page_bits;
};

__device__ __forceinline__ Row row_of(int row, const int* map, const int* table, int columns,
                                      int sequences, int page_bits, int kind) {
  if (kind == PLAIN) return Row{nullptr, 0, 0};
  if (kind == OFFSET) return Row{nullptr, map[row], 0};
  int sequence = 0;
  if (kind == TABLE_BY_ROW) {
    sequence = map[row];
  } else {
    // The last sequence that starts at this row or before it: an empty one has no row.
    int above = sequences;
    while (sequence + 1 < above) {
      int middle = (sequence + above) / 2;
      if (map[middle] <= row) {
        sequence = middle;
      } else {
        above = middle;
      }
    }
  }
  return Row{table + (long long)sequence * columns, 0, page_bits};
}

__device__ __forceinline__ int put(const Row& row, int at) {
  if (!row.pages) return row.offset + at;
  int page = at >> row.page_bits;
  return (__ldg(row.pages + page) << row.page_bits) + at - (page << row.page_bits);
}

// Where fewer than enough are as large as `past` and too many as `least`: equal ones fill up.
__device__ __forceinline__ void fill_up(const float* source, int length, float least, float past,
                                        const Row& row, int* own, int* listed) {
  const int thread = threadIdx.x;
  if (thread == 0) *listed = 0;
  __syncthreads();
  for (int at = thread; at < length; at += THREADS) {
    if (source[at] >= past) own[atomicAdd(listed, 1)] = put(row, at);
  }
  __syncthreads();
  for (int at = thread; at < length; at += THREADS) {
    if (source[at] >= least && !(source[at] >= past)) {
      int spot = *listed < COUNT ? atomicAdd(listed, 1) : COUNT;
      if (spot < COUNT) own[spot] = put(row, at);
    }
  }
  __syncthreads();
  for (int i = *listed + thread; i < COUNT; i += THREADS) own[i] = -1;
}

// Writes the places of the largest COUNT of all threads' keys: narrows down to the key that so many
// are as large as. `most` are as large as `low`, and `fewest` as `high`; place_of(i) is where
// mine[i] was. counts[0] and counts[1] are 0.
template <int KEPT, class Place>
__device__ __forceinline__ void settle(const int (&mine)[KEPT], Place place_of, int low, int high,
                                       int most, int fewest, const Row& row, int* own, int* totals,
                                       int& turn, int* counts) {
  const int FEW = 64, thread = threadIdx.x;
  __shared__ int2 last[FEW];
  if (most == COUNT) {
    high = low;
    fewest = most;
  }
  for (int i = 0; low + 1 < high && most - fewest > FEW; ++i) {
    // A little to both sides of where it would lie if scores thinned out evenly; or halfway.
    int middle = middle_of(low, high);
    if (i % 4 != 3) {
      float aim = COUNT + (i % 2 ? 0.03f : -0.03f) * (most - fewest);
      float part = fminf(fmaxf(thinned(most, aim, fewest), 0.0f), 1.0f);
      middle = key_of(score_of(low) * (1.0f - part) + score_of(high) * part);
      if (i % 4 == 2) middle = low + (int)(((float)high - (float)low) * part);
      middle = middle <= low ? low + 1 : middle >= high ? high - 1 : middle;
    }
    int part = 0;
#pragma unroll
    for (int j = 0; j < KEPT; ++j) part += mine[j] >= middle;
    int count = summed(part, totals, turn);
    if (count >= COUNT) {
      low = middle;
      most = count;
    }
    if (count <= COUNT) {
      high = middle;
      fewest = count;
    }
  }
  const bool equal = most - fewest > FEW;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    if (mine[i] >= high) {
      own[atomicAdd(&counts[0], 1)] = put(row, place_of(i));
    } else if (mine[i] >= low) {
      int spot = atomicAdd(&counts[1], 1), at = place_of(i);
      if (!equal) {
        last[spot] = make_int2(mine[i], at);
      } else if (fewest + spot < COUNT) {
        own[fewest + spot] = put(row, at);
      }
    }
  }
  if (equal) return;
  // The last few find their places by comparing each with each.
  __syncthreads();
  for (int i = thread; i < counts[1]; i += THREADS) {
    int place = fewest;
    for (int j = 0; j < counts[1]; ++j) {
      place += last[j].x > last[i].x || (last[j].x == last[i].x && j < i);
    }
    if (place < COUNT) own[place] = put(row, last[i].y);
  }
}

// Those listed, of which `found` are as large as `threshold`.
__device__ __forceinline__ void settle_list(const int2* list, int found, int threshold,
                                            const Row& row, int* own, int* totals, int& turn,
                                            int* counts) {
  const int kept = ROOM / THREADS, thread = threadIdx.x;
  int mine[kept];
  int largest = NONE;
#pragma unroll
  for (int i = 0; i < kept; ++i) {
    int spot = i * THREADS + thread;
    mine[i] = spot < found ? key_of(__int_as_float(list[spot].x)) : NONE;
    largest = max(largest, mine[i]);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (thread == 0) counts[0] = counts[1] = 0;
  if ((thread & 31) == 0) atomicMax(&counts[2], largest);
  __syncthreads();
  auto place_of = [&](int i) { return list[i * THREADS + thread].y; };
  settle(mine, place_of, threshold, counts[2] + 1, found, 0, row, own, totals, turn, counts);
}

#if SHORT
__device__ __forceinline__ int bin_of(int key, float base, float scale) {
  return min((int)((score_of(key) - base) * scale), BINS - 1);
}

// A row of at most SHORT scores: the threads hold all of it, and count it into bins between its
// smallest and its largest score, to know in which bin the key lies that COUNT are as large as.
// `bins` has room for BINS numbers, and ends[0] to ends[4] are 0, 0, 0 and twice the largest int.
// False, and nothing is written, where too few scores are numbers.
__device__ __forceinline__ bool settle_short(const float* source, int length, const Row& row,
                                             int* own, int* bins, int* ends, int* totals, int& turn,
                                             int* counts) {
  const int kept = SHORT / THREADS, thread = threadIdx.x, past = 0x7fffffff;
  int mine[kept];
#pragma unroll
  for (int i = 0; i < kept; ++i) {
    int at = i * THREADS + thread;
    float score = at < length ? source[at] : __int_as_float(past);
    mine[i] = score == score ? key_of(score) : NONE;
  }
  int smallest = past, largest = NONE, part = 0;
#pragma unroll
  for (int i = 0; i < kept; ++i) {
    part += mine[i] != NONE;
    if (mine[i] != NONE) smallest = min(smallest, mine[i]);
    largest = max(largest, mine[i]);
  }
  smallest = __reduce_min_sync(0xffffffffu, smallest);
  largest = __reduce_max_sync(0xffffffffu, largest);
  if ((thread & 31) == 0) {
    atomicMin(&ends[3], smallest);
    atomicMax(&counts[2], largest);
  }
  for (int i = thread; i < BINS; i += THREADS) bins[i] = 0;
  // Its barrier is for the extremes and the bins as well.
  const int valid = summed(part, totals, turn);
  if (valid < COUNT) return false;
  int low = ends[3], high = counts[2] + 1, most = valid, fewest = 0;
  const float base = score_of(low), scale = BINS / (score_of(high - 1) - base);
  if (valid > COUNT && scale > 0.0f && scale < 1e30f) {
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      if (mine[i] != NONE) atomicAdd(&bins[bin_of(mine[i], base, scale)], 1);
    }
    __syncthreads();
    if (thread == 0) ends[3] = past;
    if (thread < LANES) {
      // Each lane has the sum of its bins, and of those above them; one finds the bin.
      const int each = BINS / LANES;
      int sum = 0;
      for (int i = 0; i < each; ++i) sum += bins[thread * each + i];
      int above = sum;
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) {
        int right = __shfl_down_sync(0xffffffffu, above, d);
        if (thread + d < LANES) above += right;
      }
      above -= sum;
      for (int i = each - 1; i >= 0; --i) {
        int here = bins[thread * each + i];
        if (above < COUNT && above + here >= COUNT) {
          ends[0] = thread * each + i;
          ends[1] = above;
          ends[2] = above + here;
        }
        above += here;
      }
    }
    __syncthreads();
    const int bin = ends[0];
    int within = past, beyond = past;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      if (mine[i] == NONE) continue;
      int its = bin_of(mine[i], base, scale);
      if (its == bin) within = min(within, mine[i]);
      if (its > bin) beyond = min(beyond, mine[i]);
    }
    within = __reduce_min_sync(0xffffffffu, within);
    beyond = __reduce_min_sync(0xffffffffu, beyond);
    if ((thread & 31) == 0) {
      atomicMin(&ends[3], within);
      atomicMin(&ends[4], beyond);
    }
    __syncthreads();
    low = ends[3];
    fewest = ends[1];
    most = ends[2];
    if (fewest) high = ends[4];
  }
  auto place_of = [&](int i) { return i * THREADS + thread; };
  settle(mine, place_of, low, high, most, fewest, row, own, totals, turn, counts);
  return true;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sampled_topk(
    const float* scores, const int* lengths, const int* row_starts, int* out, const int* map,
    const int* table, int stride, int columns, int sequences, int page_bits, int kind) {
  const int LEAST = -0x7f800001, PAST = 0x7f800001;  // minus infinity; no number
#if SHORT
  __shared__ int ends[5];
#endif
  __shared__ int2 list[ROOM];  // a score's bits, its place
  __shared__ int totals[3], listed, lowest, counts[3];
  const int row = blockIdx.x, thread = threadIdx.x, length = lengths[row];
  const float* source = scores + (long long)row * stride + (row_starts ? row_starts[row] : 0);
  int* own = out + (long long)row * COUNT;
  if (length <= COUNT) {
    const Row all = row_of(row, map, table, columns, sequences, page_bits, kind);
    for (int i = thread; i < COUNT; i += THREADS) own[i] = i < length ? put(all, i) : -1;
    return;
  }
  int turn = 0;
  if (thread == 0) {
    totals[0] = totals[1] = totals[2] = counts[0] = counts[1] = 0;
    lowest = 0x7fffffff;
    counts[2] = NONE;
  }
#if SHORT
  if (thread == 0) {
    ends[0] = ends[1] = ends[2] = 0;
    ends[3] = ends[4] = 0x7fffffff;
  }
  __syncthreads();
  if (length <= SHORT) {
    const Row whole = row_of(row, map, table, columns, sequences, page_bits, kind);
    int* bins = reinterpret_cast<int*>(list);
    if (!settle_short(source, length, whole, own, bins, ends, totals, turn, counts)) {
      fill_up(source, length, score_of(LEAST), score_of(PAST), whole, own, &listed);
    }
    return;
  }
#endif

  // The sample: sectors of 8 scores, evenly spread.
  const int each = SAMPLE / THREADS;
  const int spread = length / SAMPLE > 1 ? length / SAMPLE * 8 : 8;
  float sample[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    int member = i * THREADS + thread;
    int at = (member >> 3) * spread + (member & 7);
    sample[i] = at < length ? source[at] : __int_as_float(0x7fffffff);
  }
  int smallest = 0x7fffffff, largest = -0x7fffffff;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    if (sample[i] == sample[i]) {
      smallest = min(smallest, key_of(sample[i]));
      largest = max(largest, key_of(sample[i]));
    }
  }
  smallest = __reduce_min_sync(0xffffffffu, smallest);
  largest = __reduce_max_sync(0xffffffffu, largest);
  __syncthreads();
  if ((thread & 31) == 0) {
    atomicMin(&lowest, smallest);
    atomicMax(&counts[2], largest);
  }
  __syncthreads();
  smallest = lowest;
  largest = counts[2];
  const int taken = length < SAMPLE ? length : SAMPLE;
  const float share = (float)taken / length, expected = COUNT * share;
  const float margin = 4.0f * sqrtf(expected * (1.0f - share)) + 1.0f;
  float many = fminf(expected + margin + 1.0f, (float)taken);
  int bottom = LEAST, top = PAST, threshold = LEAST, found = 0;
  bool exact = false, forced = false;

  for (int attempt = 0;; ++attempt) {
    if (forced) {
      threshold = bottom + 1;
    } else if (attempt < 4) {
      // The largest key that about `many` of the sample are as large as: where it would lie if
      // they thinned out evenly, in turns with halfway; by key at last, which ends.
      int low = smallest, high = largest + 1, most = taken, fewest = 0;
      for (int i = 0; low + 1 < high; ++i) {
        int middle = middle_of(low, high);
        if (i < 12) {
          float part = i % 4 ? thinned(most, many + 0.25f * margin, fewest) : 0.5f;
          int value = key_of(score_of(low) * (1.0f - part) + score_of(high) * part);
          middle = value <= low ? low + 1 : value >= high ? high - 1 : value;
        }
        float least = score_of(middle);
        int mine = 0;
#pragma unroll
        for (int j = 0; j < each; ++j) mine += sample[j] >= least;
        int count = summed(mine, totals, turn);
        if (count >= many) {
          low = middle;
          most = count;
          if (count <= many + 0.5f * margin) break;
        } else {
          high = middle;
          fewest = count;
        }
      }
      exact = low + 1 >= high;
      threshold = low;
      many = most;
      if (threshold <= bottom || threshold >= top) threshold = middle_of(bottom, top);
    } else {
      threshold = middle_of(bottom, top);
    }
    if (bottom + 1 >= top) break;
    if (thread == 0) listed = 0;
    __syncthreads();
    list_row(source, length, score_of(threshold), list, &listed);
    __syncthreads();
    found = listed;
    __syncthreads();
    if (found >= COUNT && found <= ROOM) break;
    // A threshold that is itself in the sample may be what too many scores are equal to.
    forced = found > ROOM && exact && !forced;
    if (found < COUNT) {
      top = threshold;
    } else {
      bottom = threshold;
    }
    many = fminf(many * (0.5f * (COUNT + ROOM)) / fmaxf((float)found, 1.0f), (float)taken);
    many = fmaxf(many, 1.0f);
  }

  // Only now, so that it takes no registers while the row is read.
  const Row places = row_of(row, map, table, columns, sequences, page_bits, kind);
  if (bottom + 1 >= top) {
    fill_up(source, length, score_of(bottom), score_of(top), places, own, &listed);
    return;
  }

  settle_list(list, found, threshold, places, own, totals, turn, counts);
}
"""
"""One block a row."""
PARAMETERS = "PPPPPPiiiii"
"""The kernel's parameters, as `Kernel` takes them."""
_SCORES, _OUT = 0, 3
"""Which of them these are."""


def sampled_topk_reference(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    count: int = 2048,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sampled_topk` in plain torch, with the largest first."""
    columns = scores.shape[1]
    column = torch.arange(columns, device=scores.device)
    first = torch.zeros_like(lengths) if row_starts is None else row_starts
    place = column[None] - first[:, None]
    # As integers: below minus infinity, which may be taken, is room for what may not.
    bits = (scores + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    outside = (place < 0) | (place >= lengths[:, None])
    outside |= scores.isnan() & (lengths > count)[:, None]
    found = keys.masked_fill(outside, -(2**31)).topk(min(count, columns), dim=1).indices
    found = torch.where(outside.gather(1, found), -1, found - first[:, None])
    return torch.nn.functional.pad(found, (0, max(count - columns, 0)), value=-1).int()


def defines(shape: Shape, count: int) -> str:
    """What stands before `SOURCE`."""
    numbers = {
        "THREADS": shape.threads,
        "BLOCKS": shape.blocks,
        "SAMPLE": shape.sample,
        "ROOM": shape.room,
        "SHORT": shape.short,
        "COUNT": count,
        **{kind.name: kind.value for kind in Kind},
    }
    return "".join(f"#define {name} {number}\n" for name, number in numbers.items())


@cache
def _kernel(shape: Shape, count: int) -> Kernel:
    return Kernel(defines(shape, count) + SOURCE, "sampled_topk", PARAMETERS)


def compile_all(count: int) -> None:
    """Begin to compile all `shapes` for `count` scores, each on a core of its own."""
    compile_soon([defines(shape, count) + SOURCE for shape in shapes()], "sampled_topk")


def sampled_topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    count: int = 2048,
    row_starts: torch.Tensor | None = None,
    shape: Shape | None = None,
    transform: Transform | None = None,
) -> torch.Tensor:
    """The `count` largest scores of each row, as places in the row; exact.

    Args:
        scores: [rows, columns] fp32 on a GPU from SM80, last dimension contiguous.
        lengths: [rows] int32, contiguous: how many scores of a row count. Read unchecked.
        count: how many are wanted, half of what can be listed at most.
        row_starts: [rows] int32, the first column that counts; None for 0.
        shape: how rows are read; by default what was measured best on an H200.
        transform: what the places become; None leaves them as they are.

    Returns:
        [rows, count] int32 relative to `row_starts`, in no order; -1 beyond a row's length. Which
        of equal scores are taken may differ from call to call. Of more than `count` scores none is
        taken that is no number.
    """
    return Selection(scores, lengths, count, row_starts, shape, transform)(scores)


class Selection:
    """`sampled_topk` of several scores, alike in all but the scores: the layers of a pass."""

    def __init__(
        self,
        scores: torch.Tensor,
        lengths: torch.Tensor,
        count: int = 2048,
        row_starts: torch.Tensor | None = None,
        shape: Shape | None = None,
        transform: Transform | None = None,
    ) -> None:
        """The arguments are those of `sampled_topk`."""
        self._rows, columns = scores.shape
        assert scores.stride(1) == 1 and lengths.is_contiguous()
        assert scores.dtype == torch.float32 and lengths.dtype == torch.int32
        cut = shape or shape_of(self._rows, columns)
        assert 2 * count <= cut.room
        self._count, self._device = count, scores.device
        # What is pointed to must stay.
        self._kept = (lengths, row_starts, transform)
        given = arguments(scores, lengths, row_starts, scores, transform)
        self._launch = Launch(_kernel(cut, count), self._rows, cut.threads, given)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """[rows, count] int32 for `scores` of the same shape and strides as the first ones."""
        out = torch.empty((self._rows, self._count), dtype=torch.int32, device=self._device)
        self._launch.point(_SCORES, scores.data_ptr())
        self._launch.point(_OUT, out.data_ptr())
        self._launch()
        return out


def arguments(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    row_starts: torch.Tensor | None,
    out: torch.Tensor,
    transform: Transform | None,
) -> tuple[int, ...]:
    """What the kernel is launched with."""
    starts = 0 if row_starts is None else row_starts.data_ptr()
    tensors = (scores.data_ptr(), lengths.data_ptr(), starts, out.data_ptr())
    stride = scores.stride(0)
    if transform is None:
        return *tensors, 0, 0, stride, 0, 0, 0, Kind.PLAIN
    table, of = 0, (0, 0, 0)
    if transform.table is not None:
        table = transform.table.data_ptr()
        of = (transform.table.stride(0), transform.sequences, transform.page_bits)
    return *tensors, transform.map.data_ptr(), table, stride, *of, transform.kind


def shape_of(rows: int, columns: int) -> Shape:
    """How `sampled_topk` reads rows of so many scores by default."""
    if columns <= _SHORT:
        return Shape(512, 3, 2048, _ROOM, _SHORT)
    if rows > _FEW_ROWS:
        sample = 1024 if columns <= 16384 else 2048 if columns <= 65536 else 4096
        return Shape(256, 5, sample, _ROOM)
    if columns >= 65536:
        return Shape(1024, 1, 4096, _ROOM)
    return Shape(512, 2, 2048 if columns <= 16384 else 4096, _ROOM)


def shapes() -> tuple[Shape, ...]:
    """All that `shape_of` returns: each is compiled by itself."""
    columns = (1, 16384, 16385, 65537)
    return tuple({shape_of(rows, each): None for rows in (1, _FEW_ROWS + 1) for each in columns})
