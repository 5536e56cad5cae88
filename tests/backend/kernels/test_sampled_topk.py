"""The largest scores of each row in CUDA against torch; without a GPU as a block of two warps."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch

from nsa_tune.backend.kernels import sampled_topk
from nsa_tune.backend.kernels.sampled_topk import Shape
from nsa_tune.backend.kernels.topk_transform import Kind, Transform, transform_reference
from tests.backend.kernels.hard_scores import KINDS, hard_scores, wrong_rows

COUNT = 256

THREADS = 64

SHIM = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>
using std::min; using std::max;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
struct Index { int x; };
static thread_local Index threadIdx{0};
static Index blockIdx{0};
static std::barrier<> block(THREADS);
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static int shown[THREADS];
static void __syncthreads() { block.arrive_and_wait(); }
static int first() { return threadIdx.x / 32 * 32; }
// What f makes of what all threads of the warp show.
template <class F> static int of_warp(int mine, F f) {
  shown[threadIdx.x] = mine;
  warps[threadIdx.x / 32]->arrive_and_wait();
  int found = f(shown + first());
  warps[threadIdx.x / 32]->arrive_and_wait();
  return found;
}
struct float4 { float x, y, z, w; };
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int __float_as_int(float v) { int b; std::memcpy(&b, &v, 4); return b; }
static float __int_as_float(int v) { float f; std::memcpy(&f, &v, 4); return f; }
static int __reduce_add_sync(unsigned, int v) {
  return of_warp(v, [](int* all) { return std::accumulate(all, all + 32, 0); });
}
static int __reduce_min_sync(unsigned, int v) {
  return of_warp(v, [](int* all) { return *std::min_element(all, all + 32); });
}
static int __reduce_max_sync(unsigned, int v) {
  return of_warp(v, [](int* all) { return *std::max_element(all, all + 32); });
}
static int __shfl_up_sync(unsigned, int v, int d) {
  int lane = threadIdx.x % 32;
  return of_warp(v, [=](int* all) { return all[lane >= d ? lane - d : lane]; });
}
static int __shfl_down_sync(unsigned, int v, int d) {
  int lane = threadIdx.x % 32;
  return of_warp(v, [=](int* all) { return all[lane + d < 32 ? lane + d : lane]; });
}
static int __shfl_sync(unsigned, int v, int lane) {
  return of_warp(v, [=](int* all) { return all[lane]; });
}
static int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <class F> static int exchanged(int* p, F f) {
  int old = __atomic_load_n(p, __ATOMIC_RELAXED);
  const int order = __ATOMIC_RELAXED;
  while (!__atomic_compare_exchange_n(p, &old, f(old), false, order, order)) {}
  return old;
}
static int atomicMin(int* p, int v) { return exchanged(p, [=](int old) { return min(old, v); }); }
static int atomicMax(int* p, int v) { return exchanged(p, [=](int old) { return max(old, v); }); }
#define __logf std::log
static float4 __ldg(const float4* p) { float4 v; std::memcpy(&v, p, 16); return v; }
static int __ldg(const int* p) { return *p; }
"""

ROWS = r"""
extern "C" void all_rows(int rows, const float* scores, const int* lengths, const int* starts,
                         int* out, const int* map, const int* table, int stride, int columns,
                         int sequences, int page_bits, int kind) {
  while (warps.size() < THREADS / 32) warps.push_back(std::make_unique<std::barrier<>>(32));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < THREADS; ++thread) {
    threads.emplace_back([=] {
      threadIdx.x = thread;
      for (int row = 0; row < rows; ++row) {
        __syncthreads();
        if (thread == 0) blockIdx.x = row;
        __syncthreads();
        sampled_topk(scores, lengths, starts, out, map, table, stride, columns, sequences,
                     page_bits, kind);
      }
    });
  }
  for (auto& one : threads) one.join();
}
"""

Select = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[0, 1024], ids=["sampled", "short rows held"])
def short(request: pytest.FixtureRequest) -> int:
    """Scores of a row up to which the kernel holds it in registers."""
    return int(request.param)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory, short: int) -> ctypes.CDLL:
    """The kernel built for the CPU, with a thread for each thread of a block."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    numbers = sampled_topk.defines(Shape(THREADS, 1, sample=256, room=512, short=short), COUNT)
    source.write_text(numbers + SHIM + sampled_topk.SOURCE + ROWS)
    command = [compiler, "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def select(kernel_device: torch.device, short: int, request: pytest.FixtureRequest) -> Select:
    """The kernel on the device that there is."""
    if kernel_device.type == "cuda":
        shape = Shape(threads=256, blocks=1, sample=256, room=512, short=short)
        return lambda scores, lengths, starts=None, transform=None: sampled_topk.sampled_topk(
            scores, lengths, COUNT, starts, shape, transform
        )
    library = request.getfixturevalue("interpreted")

    def run(
        scores: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor | None = None,
        transform: Transform | None = None,
    ) -> torch.Tensor:
        out = torch.full((len(scores), COUNT), -9, dtype=torch.int32)
        passed = sampled_topk.arguments(scores, lengths, starts, out, transform)
        kinds = {"P": ctypes.c_void_p, "i": ctypes.c_int}
        values = [
            kinds[letter](one) for letter, one in zip(sampled_topk.PARAMETERS, passed, strict=True)
        ]
        library.all_rows(len(scores), *values)
        return out

    return run


def values(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What was chosen, in order: equal for two exact selections whatever they do with ties."""
    found = scores.gather(1, chosen.long().clamp_min(0))
    return found.masked_fill(chosen < 0, -torch.inf).sort(1).values


def check(select: Select, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    chosen = select(scores, lengths)
    wanted = sampled_topk.sampled_topk_reference(scores, lengths, COUNT)
    assert torch.equal(values(scores, chosen), values(scores, wanted))
    for row, length in zip(chosen.cpu(), lengths.tolist(), strict=True):
        valid = row[row >= 0]
        assert len(valid.unique()) == len(valid) == min(length, COUNT)
        assert not len(valid) or int(valid.max()) < length
    return chosen


def some(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(rows, columns, generator=generator).to(device)


def full(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows,), columns, dtype=torch.int32, device=device)


@pytest.mark.parametrize("columns", [257, 511, 700, 2000, 9001])
def test_it_finds_the_largest(kernel_device: torch.device, select: Select, columns: int) -> None:
    check(select, some(7, columns, kernel_device), full(7, columns, kernel_device))


def test_rows_have_lengths_of_their_own(kernel_device: torch.device, select: Select) -> None:
    lengths = torch.tensor([0, 1, 255, 256, 257, 900], dtype=torch.int32, device=kernel_device)

    chosen = check(select, some(6, 900, kernel_device), lengths)

    assert chosen[2, :255].tolist() == list(range(255)) and chosen[2, 255] == -1


def test_a_sample_that_misleads_changes_nothing(
    kernel_device: torch.device, select: Select
) -> None:
    # The sample takes 8 of each 128: here all that is large lies outside of them, or within.
    scores = some(5, 4096, kernel_device)
    apart = scores.view(5, -1, 128)
    apart[0, :, 8:] += 100.0
    apart[1, :, :8] += 100.0
    scores[2] = torch.arange(4096, device=kernel_device) % 128
    scores[3] = scores[3].exp().exp().exp()
    scores[4, 8:4000] -= 50.0
    check(select, scores, full(5, 4096, kernel_device))


@pytest.mark.parametrize("value", [0.0, -3.5, -torch.inf, torch.inf])
def test_equal_scores_fill_up(kernel_device: torch.device, select: Select, value: float) -> None:
    scores = torch.full((4, 900), value, device=kernel_device)
    scores[1, 100:150] = 2.0
    scores[2, ::2] *= -1
    scores[3, :256] = 7.0
    check(select, scores, full(4, 900, kernel_device))


def test_two_zeros_are_one(kernel_device: torch.device, select: Select) -> None:
    scores = -some(2, 500, kernel_device).abs()
    scores[:, :40], scores[:, 40:300] = 0.0, -0.0
    check(select, scores, full(2, 500, kernel_device))


def test_rows_start_where_they_are_told(kernel_device: torch.device, select: Select) -> None:
    scores = some(3, 1601, kernel_device)
    starts = torch.tensor([0, 101, 350], dtype=torch.int32, device=kernel_device)
    lengths = torch.tensor([1600, 1400, 40], dtype=torch.int32, device=kernel_device)

    chosen = select(scores, lengths, starts)

    wanted = sampled_topk.sampled_topk_reference(scores, lengths, COUNT, starts)
    assert torch.equal(chosen.sort(1).values, wanted.sort(1).values)


def test_what_is_no_number_is_not_taken(kernel_device: torch.device, select: Select) -> None:
    scores = some(3, 900, kernel_device)
    scores[0, :750] = torch.nan
    scores[1, 7] = torch.nan
    scores[2] = torch.nan

    chosen = select(scores, full(3, 900, kernel_device))

    assert sorted(chosen[0].tolist()) == [-1] * 106 + list(range(750, 900))
    assert 7 not in chosen[1].tolist() and int(chosen[1].min()) >= 0
    assert set(chosen[2].tolist()) == {-1}


def test_the_reference_is_right_on_ten_thousand_hard_rows() -> None:
    scores, lengths, kinds = hard_scores(10_000, 400, 1, torch.device("cpu"))

    chosen = sampled_topk.sampled_topk_reference(scores, lengths, 128)

    assert not wrong_rows(chosen, scores, lengths, 128).any()
    assert len(kinds.unique()) == len(KINDS)
    for row, length, places in zip(scores[::50], lengths[::50], chosen[::50], strict=True):
        values = row[places[places >= 0].long()].tolist()
        numbers = sorted((x for x in row[:length].tolist() if x == x), reverse=True)
        assert len(values) == length if length <= 128 else values == numbers[:128]


def test_hard_rows_are_selected_as_the_reference_does(
    kernel_device: torch.device, select: Select
) -> None:
    rows = 10_000 if kernel_device.type == "cuda" else 48
    scores, lengths, _ = hard_scores(rows, 700, 2, kernel_device)

    assert not wrong_rows(select(scores, lengths), scores, lengths, COUNT).any()


@pytest.mark.parametrize("what", ["twice", "worse", "missing", "beyond", "no number"])
def test_a_wrong_row_is_seen(what: str) -> None:
    scores, lengths = some(3, 400, torch.device("cpu")), full(3, 400, torch.device("cpu"))
    scores[1, 7] = torch.nan
    chosen = sampled_topk.sampled_topk_reference(scores, lengths, 128)
    chosen[1, 5] = {
        "twice": int(chosen[1, 6]), "worse": int(scores[1].nan_to_num().argmin()), "missing": -1,
        "beyond": 400, "no number": 7,
    }[what]  # fmt: skip

    assert wrong_rows(chosen, scores, lengths, 128).tolist() == [False, True, False]


def test_few_rows_are_read_by_larger_blocks() -> None:
    assert sampled_topk.shape_of(1, 16384).threads > sampled_topk.shape_of(8192, 16384).threads
    assert sampled_topk.shape_of(1, 131072).threads > sampled_topk.shape_of(1, 8192).threads


def test_every_default_shape_is_known_beforehand() -> None:
    found = {
        sampled_topk.shape_of(rows, columns)
        for rows in (1, 264, 265, 9000)
        for columns in (1, 16384, 16385, 65535, 65536, 65537, 200_000)
    }

    assert found == set(sampled_topk.shapes())


def transforms(device: torch.device, lens: list[int], keys: int) -> dict[str, Transform]:
    """Every kind of transform of a batch with `lens` new tokens a sequence, some of them none."""
    generator = torch.Generator().manual_seed(3)

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def table(page_size: int) -> torch.Tensor:
        # Wider than it must be, and a slice of something wider still.
        pages = torch.randperm(len(lens) * (keys + 3), generator=generator).int()
        return pages.view(len(lens), -1)[:, : keys // page_size + 2].to(device)

    starts = whole([sum(lens[:i]) for i in range(len(lens) + 1)])
    sequences = whole([i for i, new in enumerate(lens) for _ in range(new)])
    return {
        "offset": Transform(Kind.OFFSET, sequences * 100_000),
        "table by row": Transform(Kind.TABLE_BY_ROW, sequences, table(1)),
        "table by start": Transform(Kind.TABLE_BY_START, starts, table(1)),
        "pages by row": Transform(Kind.TABLE_BY_ROW, sequences, table(64), 64),
        "pages by start": Transform(Kind.TABLE_BY_START, starts, table(64), 64),
    }


@pytest.mark.parametrize(
    "kind", ["offset", "table by row", "table by start", "pages by row", "pages by start"]
)
@pytest.mark.parametrize("lens", [[6], [1, 5], [0, 2, 0, 0, 3, 1, 0]])
def test_places_become_what_attention_reads(
    kernel_device: torch.device, select: Select, kind: str, lens: list[int]
) -> None:
    # Rows of nothing, of fewer than are selected, of as many, and of more; as one behind the other.
    scores = some(6, 2000, kernel_device)
    lengths = torch.tensor([0, 255, 256, 257, 900, 1201], dtype=torch.int32, device=kernel_device)
    starts = torch.tensor([0, 3, 100, 1, 450, 799], dtype=torch.int32, device=kernel_device)
    transform = transforms(kernel_device, lens, 1201)[kind]

    chosen = select(scores, lengths, starts, transform)

    places = sampled_topk.sampled_topk_reference(scores, lengths, COUNT, starts)
    wanted = transform_reference(places, transform)
    assert torch.equal(chosen.sort(1).values, wanted.sort(1).values)
    # What is none comes last: a kernel that is told a row's length reads no further.
    assert ((chosen >= 0).sum(1) == lengths.clamp_max(COUNT)).all()
    assert chosen[1, :255].min() >= 0 and chosen[1, 255] == -1


def test_equal_scores_that_fill_up_are_transformed_too(
    kernel_device: torch.device, select: Select
) -> None:
    scores = torch.zeros(2, 900, device=kernel_device)
    scores[0, 800:] = 1.0
    transform = transforms(kernel_device, [1, 1], 900)["pages by start"]

    chosen = select(scores, full(2, 900, kernel_device), None, transform)

    every = torch.arange(900, dtype=torch.int32, device=kernel_device).expand(2, -1)
    slots = transform_reference(every, transform)
    assert set(slots[0, 800:].tolist()) <= set(chosen[0].tolist()) <= set(slots[0].tolist())
    assert set(chosen[1].tolist()) <= set(slots[1].tolist())
    assert all(len(row.unique()) == COUNT for row in chosen)
