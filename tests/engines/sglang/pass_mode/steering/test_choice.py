"""The choice of a way holds for any times, and needs no engine's objects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import MARGIN, Choice, bucket, graph_size
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from tests.engines.sglang.pass_mode.fakes import TOPK, Dense, room, times

SIZES, ROWS = (128, 512, 2048), (8, 64, 256)
CHOICE = Choice(SIZES, TOPK, {PassMode.DENSE_GRAPH: Dense(SIZES)}, ROWS)
_US = st.floats(1e3, 1e6)


@st.composite
def _batches(draw: st.DrawFn) -> Batch:
    lens = draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 700)), min_size=1))
    return Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])


@given(
    batch=_batches(),
    took=st.fixed_dictionaries({str(mode): _US for mode in PassMode}),
    given_up=st.frozensets(st.sampled_from(sorted(set(PassMode) - {PassMode.ENGINE}))),
)
def test_no_way_is_taken_that_is_given_up_or_gains_no_margin(
    batch: Batch, took: dict[str, float], given_up: frozenset[PassMode]
) -> None:
    points = [(size, context) for size in (8, *SIZES) for context in (1, 5000)]
    known = times(**{mode: dict.fromkeys(points, us) for mode, us in took.items()})
    estimates = CHOICE.estimates_us(known, batch, batch.q_tokens)

    taken = CHOICE.fastest(known, batch, batch.q_tokens, given_up)

    assert taken not in given_up
    if not estimates:  # larger than any graph: as if nothing had been measured
        assert taken in (PassMode.TABLE_KERNEL, PassMode.ENGINE)
    elif taken is not PassMode.ENGINE:
        own = MARGIN if taken is not PassMode.TABLE_KERNEL else 0.01
        assert estimates[taken] < (1 - own) * estimates[PassMode.ENGINE]


def _waiting(kernel_us: float, host_us: float) -> PassTimes:
    """Times of an engine whose own way takes 100 ms on the GPU."""
    own, other = (
        PassTime(mode, 512, 5000, pass_us, selects=True, host_us=host)
        for mode, pass_us, host in (
            (PassMode.ENGINE, 100e3, 50e3), (PassMode.TABLE_KERNEL, kernel_us, host_us)
        )
    )  # fmt: skip
    return PassTimes({}, [own, other])


@pytest.mark.parametrize(
    ("kernel_us", "host_us", "taken"),
    [
        (95e3, 50e3, PassMode.TABLE_KERNEL),
        (95e3, 94e3, PassMode.ENGINE),
        (91e3, 90e3, PassMode.ENGINE),
        (89e3, 88e3, PassMode.TABLE_KERNEL),
    ],
)
def test_a_kernel_whose_pass_waits_for_the_host_must_gain_a_tenth(
    kernel_us: float, host_us: float, taken: PassMode
) -> None:
    batch = Batch.extend([4500], [512])

    assert CHOICE.fastest(_waiting(kernel_us, host_us), batch, None) is taken


def test_before_anything_is_measured_there_are_no_estimates() -> None:
    batch = Batch.extend([0], [100])

    assert CHOICE.estimates_us(None, batch, 100) == {}
    assert CHOICE.fastest(None, batch, 100) is PassMode.TABLE_KERNEL


def test_rows_beyond_the_largest_decode_graph_take_several() -> None:
    known = times(engine={(2048, 5000): 1e6}, decode_graph={(8, 5000): 10.0, (256, 5000): 100.0})
    batch = Batch.extend([100], [600])

    found = CHOICE.estimates_us(known, batch, 600)

    # 256, 256 and 88 rows, the last in a graph of 256 too.
    assert found[PassMode.DECODE_GRAPH] == pytest.approx(3 * 100.0)


@pytest.mark.parametrize(
    ("rows", "took"), [(3, 10.0), (64, 20.0), (256, 50.0), (300, 70.0), (520, 110.0)]
)
def test_rows_of_several_passes_cost_their_sum(rows: int, took: float) -> None:
    known = times(decode_graph={(8, 9000): 10.0, (64, 9000): 20.0, (256, 9000): 50.0})
    batch = Batch.extend([4000], [rows])

    assert CHOICE.estimates_us(known, batch, rows)[PassMode.DECODE_GRAPH] == pytest.approx(took)
    assert PassMode.DECODE_GRAPH not in CHOICE.estimates_us(known, batch)


def test_dense_graphs_take_as_many_sequences_as_they_have_room_for() -> None:
    known = times(engine={(512, 5000): 1e6}, dense_graph={(512, 5000): 1e3})
    most = room(512)

    fits = CHOICE.estimates_us(known, Batch.extend([0] * most, [512 // most] * most))
    more = CHOICE.estimates_us(known, Batch.extend([0] * (most + 1), [500 // most] * (most + 1)))

    assert PassMode.DENSE_GRAPH in fits
    assert PassMode.DENSE_GRAPH not in more


@pytest.mark.parametrize(("new", "engine_us"), [(63, 200e3), (64, 60e3), (128, 60e3)])
def test_sglang_runs_what_would_be_mostly_padding_eagerly(new: int, engine_us: float) -> None:
    known = times(engine={(128, 5000): 60e3}, eager={(2048, 5000): 200e3})

    found = CHOICE.estimates_us(known, Batch.extend([3000], [new]))

    assert found[PassMode.ENGINE] == pytest.approx(engine_us)


def test_an_eager_pass_takes_no_less_than_the_graph_that_it_stands_for() -> None:
    known = times(engine={(128, 5000): 60e3}, eager={(2048, 5000): 40e3})

    found = CHOICE.estimates_us(known, Batch.extend([3000], [63]))

    assert found[PassMode.ENGINE] == pytest.approx(60e3)


def test_sglangs_own_way_has_no_time_below_the_shortest_that_was_measured() -> None:
    """By a time that is too long the monitor would find SGLang's own passes faster than measured,
    and give up ways that gain less than that."""
    known = times(engine={(512, 5000): 60e3}, decode_graph={(256, 5000): 10.0})

    for new, ways in (
        (100, {PassMode.DECODE_GRAPH}),
        (300, {PassMode.ENGINE, PassMode.DECODE_GRAPH}),
    ):
        batch = Batch.extend([3000], [new])
        assert CHOICE.estimates_us(known, batch, new).keys() == ways
    assert CHOICE.fastest(known, Batch.extend([3000], [100]), 100) is PassMode.TABLE_KERNEL


def test_without_decode_graphs_no_rows_are_priced() -> None:
    known = times(engine={(128, 5000): 60e3}, decode_graph={(8, 5000): 10.0})
    choice = Choice(SIZES, TOPK, {}, ())

    assert set(choice.estimates_us(known, Batch.extend([3000], [64]), 64)) == {PassMode.ENGINE}


@pytest.mark.parametrize(
    ("tokens", "size"), [(63, 63), (64, 128), (128, 128), (300, 512), (2048, 2048), (2049, 2049)]
)
def test_a_graph_that_sglang_runs_is_filled_up(tokens: int, size: int) -> None:
    assert graph_size(tokens, SIZES) == size


@given(tokens=st.integers(1, 4096))
def test_a_bucket_is_the_smallest_size_that_holds_the_tokens(tokens: int) -> None:
    size = bucket(SIZES, tokens)

    if size is None:
        assert tokens > SIZES[-1]
    else:
        assert size >= tokens
        assert not any(tokens <= other < size for other in SIZES)


@given(prefix=st.integers(0, 9000), new=st.integers(1, 900), count=st.integers(1, 4))
def test_equal_sequences_count_with_their_mean(prefix: int, new: int, count: int) -> None:
    """Up to where a sequence itself begins to select, which makes its queries unequal."""
    batch = Batch.extend([prefix] * count, [new] * count)
    below = CHOICE.context(batch) / (batch.pairs / batch.q_tokens)

    assert 0.5 < below < 1.001
    if count == 1 or prefix + new <= TOPK or prefix >= TOPK:
        assert below == pytest.approx(1)


def test_one_long_sequence_among_short_ones_counts_less_than_their_mean() -> None:
    batch = Batch.extend([0, 16384], [1500, 100])
    mean = batch.pairs / batch.q_tokens

    attended = (1500 * 1501 // 2 + 100 * TOPK) / 1600
    assert CHOICE.context(batch) == pytest.approx(attended + 0.14 * (mean - attended))
    assert CHOICE.context(batch.sums) == mean, "sums alone do not tell"


def test_a_whole_pass_graph_of_other_tokens_than_sglangs_own_has_its_own_time() -> None:
    points = {(512, 5000): 10e3, (1280, 5000): 20e3, (2048, 5000): 40e3}
    known = times(dense_graph=points)
    choice = Choice(SIZES, TOPK, {PassMode.DENSE_GRAPH: Dense((512, 1280, 2048))}, ())

    def estimate_us(tokens: int) -> float | None:
        return choice.estimates_us(known, Batch.extend([0], [tokens])).get(PassMode.DENSE_GRAPH)

    assert estimate_us(1100) == pytest.approx(20e3)
    assert estimate_us(1300) == pytest.approx(40e3)
    # SGLang does not pad more than twofold.
    assert estimate_us(256) == pytest.approx(10e3)
    assert estimate_us(255) is None
