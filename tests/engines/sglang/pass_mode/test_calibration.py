"""Which passes are measured, and what they leave behind, on a made-up runner."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang.pass_mode import calibration as module
from nsa_tune.engines.sglang.pass_mode.calibration import cases, measure
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.ranks import Ranks
from tests.engines.sglang.pass_mode.fakes import (
    TOPK,
    Alone,
    Dense,
    Hidden,
    Sparse,
    Speculation,
    batch,
    runner,
)

ENGINE, TABLE, EAGER = PassMode.ENGINE, PassMode.TABLE_KERNEL, PassMode.EAGER
DENSE, DENSE_MLA, SPARSE, DECODE = (
    PassMode.DENSE_GRAPH,
    PassMode.DENSE_MLA_GRAPH,
    PassMode.SPARSE_GRAPH,
    PassMode.DECODE_GRAPH,
)
SIZES, ROWS = (64, 1024, 4096), (1, 8, 48, 64)


def _runner(sizes: tuple[int, ...] = SIZES, **changes: Any) -> Any:
    """A runner with a pool of 80,000 slots that notes its passes."""
    made = runner(sizes, ROWS, **changes)
    made.prefill_cuda_graph_runner.device = "cpu"
    made.prefill_cuda_graph_runner.capture_prepare = lambda size: (batch([0], [size]), "backend")
    made.max_total_num_tokens = 80_000
    made.model_config = SimpleNamespace(context_len=40_000, vocab_size=1000)
    made.req_to_token_pool = SimpleNamespace(
        req_to_token=torch.zeros(70, 40_100, dtype=torch.int32)
    )
    made.passes = []
    made._forward_raw = lambda forward_batch, proxy: made.passes.append(forward_batch)
    return made


def _steering(made: Any, modes: tuple[PassMode, ...] = (DENSE, DENSE_MLA)) -> Steering:
    graphs = {mode: Sparse(SIZES) if mode is SPARSE else Dense(SIZES) for mode in modes}
    return Steering(
        made, TOPK, cast("Ranks", Alone()), graphs=cast("Any", graphs), decode=RowGraphs.of(made)
    )


def _all_measured(made: Any) -> list[PassTime]:
    steering = _steering(made)
    return measure(made, steering, cases(made, steering, {}))


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)


def _cases(
    modes: tuple[PassMode, ...] = (DENSE, DENSE_MLA), **changes: Any
) -> list[tuple[PassMode, int, int, tuple[int, ...]]]:
    made = _runner(**changes)
    found = cases(made, _steering(made, modes), {})
    return [(one.mode, one.size, one.prefix, one.lens) for one in found]


def test_each_way_is_measured_where_it_can_run() -> None:
    found = _cases()

    assert len(set(found)) == len(found)
    at: dict[tuple[int, int, tuple[int, ...]], set[PassMode]] = {}
    for mode, size, prefix, lens in found:
        at.setdefault((size, prefix, lens), set()).add(mode)
    usual = {ENGINE, TABLE}
    rows: dict[tuple[int, int, tuple[int, ...]], set[PassMode]] = {
        (8, prefix, (8,)): {DECODE} for prefix in (0, 2048, 16384)
    }
    assert at == {
        # Prompts, and turns behind a short prefix.
        (64, 0, (64,)): {*usual, DENSE, DENSE_MLA} | {DECODE},
        (64, 1984, (64,)): {*usual, DENSE_MLA},
        (1024, 0, (1024,)): {*usual, DENSE, DENSE_MLA},
        (1024, 1536, (512, 512)): {*usual, DENSE_MLA},
        (4096, 0, (2048, 2048)): {*usual, EAGER, DENSE, DENSE_MLA},
        (4096, 1536, (512,) * 8): {EAGER},
        (4096, 1920, (128,) * 32): {*usual, EAGER, DENSE_MLA},
        # Many short prompts, and the largest graph with much padding.
        (4096, 0, (512,) * 8): usual,
        (4096, 0, (1025,)): usual,
        # A few new tokens behind long prefixes that there is room for.
        (64, 2048, (64,)): {*usual, DECODE},
        (64, 16384, (64,)): {*usual, DECODE},
        (1024, 2048, (1024,)): usual,
        (1024, 16384, (1024,)): usual,
        # Rows of decode graphs.
        **rows,
    }


def test_many_tokens_of_dense_mla_are_measured_behind_long_prefixes() -> None:
    """By its own graph, which absorbs, and without one, expanded."""
    many = [
        (mode, prefix)
        for mode, size, prefix, lens in _cases((DENSE,), attn_backend=SimpleNamespace())
        if lens == (4096,)
    ]

    assert set(many) == {
        *((mode, 0) for mode in (ENGINE, TABLE, EAGER, DENSE)),
        *((mode, prefix) for mode in (ENGINE, EAGER) for prefix in (2048, 16384)),
    }
    assert len(many) == len(set(many))


def test_graphs_over_prefixes_are_measured_with_each_room_little_and_fully_used() -> None:
    found = _cases((PassMode.PREFIX_GRAPH,), attn_backend=SimpleNamespace())
    over = [(size, prefix) for mode, size, prefix, _ in found if mode is PassMode.PREFIX_GRAPH]

    # 40,000 tokens are the longest here.
    assert over == [
        (size, prefix) for size in (64, 1024, 4096) for prefix in (2112, 8192, 8256, 32768)
    ]


def test_sparse_graphs_are_measured_behind_all_prefixes() -> None:
    found = _cases((SPARSE,))
    sparse = [(size, prefix, lens) for mode, size, prefix, lens in found if mode is SPARSE]

    assert sparse == [
        (size, prefix, (size,)) for size in (64, 1024, 4096) for prefix in (0, 2048, 16384)
    ]


def test_of_many_captured_sizes_a_few_are_measured() -> None:
    """SGLang's own list: each size would take seconds, and tell little that others do not."""
    sizes = (
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
        *range(1280, 4097, 256), *range(4608, 8193, 512),
    )  # fmt: skip
    made = _runner(sizes=sizes)
    found = [one for one in cases(made, _steering(made), {}) if one.mode is ENGINE]

    assert {one.size for one in found} == {128, 512, 1024, 2048, 4096, 8192}
    assert {one.size for one in found if one.longest > TOPK} == {128, 512, 2048}
    # A graph that is never half empty shows too little of what padding costs.
    assert not any(one.padding for one in found)


@pytest.mark.parametrize("mode", [ENGINE, DENSE, DENSE_MLA, SPARSE, DECODE])
def test_where_times_are_known_their_sizes_are_measured(mode: PassMode) -> None:
    """With another largest graph those that are measured by themselves are others throughout."""
    there, here = (512, 1024, 2048, 4096, 8192), (384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
    known = {"prefill_sizes": there, "decode_sizes": [40], "whole_pass_sizes": {SPARSE: [2048]}}
    made = _runner(sizes=here)
    made.decode_cuda_graph_runner.capture_bs = [8, 40, 56]
    steering = _steering(made, (DENSE, DENSE_MLA, SPARSE))
    steering.graphs = {**steering.graphs, SPARSE: cast("Any", Sparse((1536, 2048)))}

    sizes = {one.size for one in cases(made, steering, known) if one.mode is mode}

    beside = {SPARSE: {2048}, DECODE: {8, 40, 56}}
    assert sizes == beside.get(mode, {512, 1024, 2048, 4096, 6144})


@given(st.sets(st.integers(1, 16384), min_size=1, max_size=70).map(sorted), st.sampled_from([2, 4]))
def test_no_size_is_far_from_a_measured_one(sizes: list[int], spacing: int) -> None:
    kept = module._spaced(sizes, spacing)

    assert {sizes[-1]} <= set(kept) <= set(sizes)
    for size in sizes:
        larger = next(measured for measured in kept if measured >= size)
        assert size == larger or larger < spacing * size or size < module._SMALLEST


def test_a_padded_pass_is_kept_as_one() -> None:
    made = _runner()
    found = _all_measured(made)

    assert {(one.mode, one.q_tokens, one.padding) for one in found if one.padding} == {
        (ENGINE, 4096, 3071)
    }
    assert all(one.host_us is not None and one.host_us <= one.pass_us for one in found)


def test_batches_of_more_requests_than_the_engine_runs_are_left_out() -> None:
    """Their rows of the page tables are not there, and an error would cost all other times."""
    made = _runner()
    made.req_to_token_pool.req_to_token = torch.zeros(1 + 4, 40_100, dtype=torch.int32)
    found = _all_measured(made)

    assert {one.batch_size for one in made.passes} == {1, 2}
    assert {(one.mode, one.q_tokens) for one in found} >= {(ENGINE, 4096), (DENSE, 1024)}


def test_a_short_context_leaves_out_longer_sequences() -> None:
    made = _runner()
    made.model_config.context_len = 1500
    made.req_to_token_pool.req_to_token = torch.zeros(70, 1504, dtype=torch.int32)
    _all_measured(made)

    assert {max(one.extend_seq_lens_cpu) for one in made.passes} == {8, 64, 512, 1024, 1025}
    assert max(int(one.seq_lens.max()) for one in made.passes) < 1500


def test_sglangs_own_way_is_measured_wherever_another_one_is() -> None:
    """Else there is nothing to compare with."""
    found = _cases()
    own = {tuple(where) for mode, *where in found if mode is ENGINE}

    assert {tuple(where) for mode, *where in found if mode not in (DECODE, EAGER)} == own


def test_turns_are_measured_without_dense_graphs_too() -> None:
    """Else their time would lie between a prompt's and that of a pass that selects keys."""
    found = _cases(())

    assert {mode for mode, *_ in found} == {ENGINE, TABLE, EAGER, DECODE}
    assert {size for mode, size, _, lens in found if len(lens) > 1} == {1024, 4096}


@pytest.mark.parametrize("size", [1, 511, 2048, 2049, 32768])
@pytest.mark.parametrize("most", [512, 2048])
def test_sequences_of_a_case_are_none_too_long_and_fill_it(size: int, most: int) -> None:
    lens = module._lens(size, most)

    assert sum(lens) == size
    assert all(0 < new <= most for new in lens)


@pytest.mark.parametrize(
    ("prefix", "lens"), [(0, (64,)), (16384, (1024,)), (1536, (512, 512, 3)), (0, (2048, 1))]
)
def test_a_cases_context_covers_a_served_batch_of_its_lengths(
    prefix: int, lens: tuple[int, ...]
) -> None:
    sums = sums_of([prefix] * len(lens), list(lens))
    assert sums is not None
    context = module.Case(ENGINE, sum(lens), prefix, lens).context

    assert context - 1 < sums.pairs / sums.q_tokens <= context


def test_rows_of_verify_passes_are_measured_by_their_tokens() -> None:
    """Graphs of 1, 8, 48 and 64 requests, of two rows each."""
    made = _runner(spec_algorithm=Speculation.EAGLE)
    made.decode_cuda_graph_runner.capture_hidden_mode = Hidden.FULL
    made.decode_cuda_graph_runner.captured_req_width = 2
    found = cases(made, _steering(made), {})

    decode = {one.size: one.lens for one in found if one.mode is DECODE}
    assert decode == {128: (128,)}


def test_rows_beyond_the_largest_prefill_graph_are_left_out() -> None:
    """A prefill of so many tokens has no graph, and runs as SGLang has it."""
    made = _runner(sizes=(4, 32))
    found = _all_measured(made)

    assert {one.q_tokens for one in found if one.mode is DECODE} == {8}


def _measured(made: Any, monkeypatch: pytest.MonkeyPatch, *, changes: bool) -> list[PassMode]:
    """The modes of the times that were kept, while the passes ran as they were forced to."""
    steering = _steering(made, (DENSE, DENSE_MLA, SPARSE))
    forced: Counter[PassMode | None] = Counter()

    def run(forward_batch: Any, proxy: Any) -> None:
        assert made.req_to_token_pool.req_to_token.any()
        forced[steering.forced] += 1

    made._forward_raw = run
    monkeypatch.setattr(module, "changed", lambda backend: changes)
    found = measure(made, steering, cases(made, steering, {}))
    # Without an indexer alone, prefixes are expanded in graphs.
    assert forced.keys() == set(PassMode) - {PassMode.PREFIX_GRAPH}
    assert steering.forced is None
    assert not made.req_to_token_pool.req_to_token.any()
    assert all(one.pass_us > 0 for one in found)
    PassTimes({}, found)
    return [one.mode for one in found]


def test_the_tables_kernel_is_kept_only_where_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = _measured(_runner(), monkeypatch, changes=False)
    other = _measured(_runner(), monkeypatch, changes=True)

    assert Counter(other) - Counter(same) == {TABLE: other.count(ENGINE)}
    assert TABLE not in same


def test_a_pass_that_fails_leaves_nothing_forced_and_no_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _runner()
    steering = _steering(made)

    def fails(forward_batch: Any, proxy: Any) -> None:
        raise RuntimeError("made up")

    made._forward_raw = fails
    with pytest.raises(RuntimeError):
        measure(made, steering, cases(made, steering, {}))

    assert steering.forced is None
    assert not made.req_to_token_pool.req_to_token.any()


@pytest.mark.parametrize(
    ("known_s", "waits_s", "launched_s", "passes", "took_us"),
    [
        (0.9, 0.0, [1.0, 0.5, 0.25], 2, (0.5e6, 0.5e6)),
        (1.0, 0.0, [1.0], 1, (1e6, 1e6)),
        (0.9, 2.0, [1.0], 1, (3e6, 1e6)),
        # Two thirds of the first launch were something else.
        (0.5, 2.0, [1.5, 0.5], 2, (2.5e6, 0.5e6)),
        (0.0, 2.0, [1.0, 0.5, 0.25], 2, (2.5e6, 0.5e6)),
        (0.0, 14.5, [1.0, 0.5], 1, (15.5e6, 1e6)),
        (0.0, 0.0, [0.5, 1.0], 2, (0.5e6, 0.5e6)),
    ],
)
def test_a_pass_that_the_gpu_takes_long_for_is_measured_once(
    known_s: float,
    waits_s: float,
    launched_s: list[float],
    passes: int,
    took_us: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that waits for its host is measured again, and the least counts.
    What its first launch does besides takes the host at least as long."""
    made = _runner()
    now_s, launches_s = [0.0], iter(launched_s)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def forward(forward_batch: Any, proxy: object) -> None:
        now_s[0] += next(launches_s)
        made.passes.append(forward_batch)

    def synchronize() -> None:
        now_s[0] += waits_s

    made._forward_raw = forward
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    batch = SimpleNamespace()
    timed = module._timed_us(made, _steering(made), EAGER, batch, known_s * 1e6)

    assert len(made.passes) == passes
    assert timed == pytest.approx(took_us)


def test_a_pass_in_which_all_wait_for_the_slowest_rank_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four ranks it launched in 42 ms what rank 0 did in 32, and all took 42."""
    now_s, made = [0.0], _runner()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: now_s.__setitem__(0, now_s[0] + 0.01))

    def longest(ranks: Alone, value: float) -> float:
        now_s[0] += 5.0  # asking the others is no part of the pass
        return value + 0.01

    monkeypatch.setattr(Alone, "longest", longest)

    made._forward_raw = lambda *given: now_s.__setitem__(0, now_s[0] + 0.032)
    found = measure(made, _steering(made), [module.Case(ENGINE, 64, 16384, (64,))])

    assert found[0].waits
    assert found[0].pass_us == pytest.approx(42e3)
    # Shorter passes take as long, so that another way may be known to be faster.
    assert PassTimes({}, found).reaches(8, selects=True)


def test_of_a_first_launch_counts_what_it_takes_longer_than_another_in_sglangs_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the second pass's 3.5 s 1 s is compiling, though it takes 2.3 times its launch."""
    now_s, made = [0.0], _runner()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: now_s.__setitem__(0, now_s[0] + 2.0))
    launches_s = iter((1.0, 0.5, 1.5, 0.5, 0.6, 1.5, 0.6))

    def forward(forward_batch: Any, proxy: object) -> None:
        now_s[0] += next(launches_s)

    made._forward_raw = forward
    modes = (ENGINE, ENGINE, ENGINE, DENSE)
    some = [module.Case(mode, 64, prefix, (64,)) for prefix, mode in enumerate(modes)]
    found = measure(made, _steering(made), some)

    assert [one.pass_us / 1e6 for one in found] == pytest.approx([2.5, 2.5, 2.6, 2.6])
