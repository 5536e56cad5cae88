"""The sequential comparison: right verdicts, few samples, and an error rate that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.bench.sequential import (
    ALPHA,
    LOOKS,
    MOST_SAMPLES,
    Contest,
    interval_of,
    verdict_of,
)
from nsa_tune.backend.dispatch.decide import Verdict

Draw = Callable[[Random], float]
logs = st.lists(st.floats(-5, 5), min_size=8, max_size=60)


def steady(us: float, noise: float = 0.003) -> Draw:
    return lambda random: us * exp(random.gauss(0, noise))


def spiky(us: float) -> Draw:
    """A clean timer that is hit by something else now and then."""
    return lambda random: us * exp(random.gauss(0, 0.004) + (random.random() < 0.1))


def run(arms: Sequence[Draw], seed: int = 0, drift: float = 0.0) -> Contest:
    random, contest, clock = Random(seed), Contest(len(arms)), 1.0
    while order := contest.active:
        clock *= 1 + drift
        contest.add({arm: (clock * arms[arm](random), clock * arms[arm](random)) for arm in order})
    return contest


def samples(contest: Contest) -> list[int]:
    return [timing.samples for timing in contest.timings()]


@given(logs, st.floats(0.001, 0.2))
def test_an_interval_holds_the_median_and_lies_within_the_values(
    values: list[float], alpha: float
) -> None:
    found = interval_of(values, alpha)

    if found is not None:
        ordered = sorted(values)
        middle = len(values) // 2
        assert min(values) <= found[0] <= ordered[middle]
        assert ordered[(len(values) - 1) // 2] <= found[1] <= max(values)


@given(logs)
def test_more_confidence_is_a_wider_interval(values: list[float]) -> None:
    narrow, wide = interval_of(values, 0.2), interval_of(values, 0.01)

    assert narrow is not None
    if wide is not None:
        assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


def test_too_few_values_have_no_interval() -> None:
    assert interval_of([1.0] * 5, 0.05) is None
    assert interval_of([1.0] * 6, 0.05) == (1.0, 1.0)


@pytest.mark.parametrize("alpha", [0.05, ALPHA / len(LOOKS)])
@pytest.mark.parametrize("count", [8, 12, 24, 40])
def test_an_interval_misses_the_median_no_more_often_than_it_says(alpha: float, count: int) -> None:
    random, trials, missed = Random(count), 4000, 0
    for _ in range(trials):
        found = interval_of([random.gauss(0, 1) for _ in range(count)], alpha)
        missed += found is not None and not found[0] <= 0 <= found[1]

    # Three standard errors of the trials beyond what is allowed.
    assert missed / trials <= alpha + 3 * (alpha / trials) ** 0.5


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (None, Verdict.UNSURE),
        ((log(1.02), log(1.05)), Verdict.WIN),
        ((log(0.999), log(1.003)), Verdict.TIE),
        ((log(1.001), log(1.004)), Verdict.TIE),
        ((log(1.005), log(1.02)), Verdict.UNSURE),
        ((log(0.5), log(2.0)), Verdict.UNSURE),
    ],
)
def test_a_verdict_needs_the_interval_on_one_side_of_the_margin(
    interval: tuple[float, float] | None, verdict: Verdict
) -> None:
    assert verdict_of(interval) is verdict


def test_an_arm_far_behind_is_done_after_one_round() -> None:
    contest = run([steady(100), steady(400)])

    assert samples(contest) == [LOOKS[0], 2]
    assert contest.verdicts()[1] is Verdict.WIN


def test_an_arm_clearly_behind_is_done_after_two_rounds() -> None:
    assert samples(run([steady(180), steady(100)])) == [4, LOOKS[0]]


def test_an_arm_that_one_hiccup_hit_twice_goes_on() -> None:
    contest = Contest(2)
    contest.add({0: (7.6, 7.6), 1: (33.0, 465.0)})
    while contest.active:
        contest.add({arm: (7.6, 7.6) if arm == 0 else (5.0, 5.0) for arm in contest.active})

    slow, fast = contest.timings()
    assert fast.median_us == 5.0 < slow.median_us


def test_close_arms_are_told_apart() -> None:
    contest = run([steady(100), steady(103)])

    assert contest.verdicts()[1] is Verdict.WIN
    assert max(samples(contest)) < MOST_SAMPLES


def test_equal_arms_are_a_tie() -> None:
    assert Verdict.TIE in run([steady(100), steady(100.1)]).verdicts()


def test_what_noise_hides_is_unsure_at_the_cap() -> None:
    contest = run([steady(100, noise=0.2), steady(101, noise=0.2)])

    assert samples(contest) == [MOST_SAMPLES] * 2
    assert set(contest.verdicts()) == {Verdict.UNSURE}


def test_a_clock_that_drifts_hides_nothing() -> None:
    """Both arms become 2 % slower a round, a hundred times the difference that matters."""
    contest = run([steady(100, 0.001), steady(104, 0.001)], drift=0.02)

    assert contest.verdicts()[1] is Verdict.WIN


def test_a_cheap_arm_goes_on_until_its_own_interval_is_narrow() -> None:
    cheap, costly = run([steady(6, 0.02)]), run([steady(6000, 0.02)])

    assert samples(cheap)[0] > samples(costly)[0] == LOOKS[0]


def test_a_stopped_contest_keeps_what_it_has() -> None:
    contest = Contest(2)
    contest.add({0: (1.0, 1.1), 1: (1.0, 1.1)})
    contest.stop()

    assert contest.active == ()
    assert samples(contest) == [2, 2]


@pytest.mark.parametrize("make", [steady, spiky], ids=["steady", "spiky"])
@pytest.mark.parametrize("ratio", [1.0, 1.0099])
def test_arms_within_the_margin_are_called_different_in_at_most_a_twentieth(
    make: Callable[[float], Draw], ratio: float
) -> None:
    """With a look after every second round or so, over which the error is shared."""
    trials = 400
    wrong = sum(
        Verdict.WIN in run([make(100), make(100 * ratio)], seed).verdicts()
        for seed in range(trials)
    )

    assert wrong / trials <= ALPHA


@pytest.mark.parametrize("make", [steady, spiky], ids=["steady", "spiky"])
def test_arms_past_the_margin_are_called_equal_in_at_most_a_twentieth(
    make: Callable[[float], Draw],
) -> None:
    trials = 400
    wrong = sum(
        Verdict.TIE in run([make(100), make(101.1)], seed).verdicts() for seed in range(trials)
    )

    assert wrong / trials <= ALPHA


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=5), st.integers(0, 99))
def test_every_contest_ends_and_the_fastest_is_sampled_most(
    latencies: list[float], seed: int
) -> None:
    contest = run([steady(us) for us in latencies], seed)

    taken = samples(contest)
    medians = [timing.median_us for timing in contest.timings()]
    assert max(taken) <= MOST_SAMPLES
    assert taken[medians.index(min(medians))] >= LOOKS[0]
    assert all(count % 2 == 0 and count >= 2 for count in taken)
