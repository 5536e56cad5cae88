"""The race of arms: right verdicts, few samples, and an error rate that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.bench.race import (
    ALPHA,
    LOOKS,
    MOST_SAMPLES,
    Race,
    verdict_of,
)
from nsa_tune.backend.dispatch.decide import Verdict

Draw = Callable[[Random], float]


def steady(us: float, noise: float = 0.003) -> Draw:
    return lambda random: us * exp(random.gauss(0, noise))


def spiky(us: float) -> Draw:
    """A clean timer that is disturbed now and then."""
    return lambda random: us * exp(random.gauss(0, 0.004) + (random.random() < 0.1))


def run(arms: Sequence[Draw], seed: int = 0, drift: float = 0.0) -> Race:
    random, race, clock = Random(seed), Race(len(arms)), 1.0
    while order := race.active:
        clock *= 1 + drift
        race.add({arm: (clock * arms[arm](random), clock * arms[arm](random)) for arm in order})
    return race


def samples(race: Race) -> list[int]:
    return [timing.samples for timing in race.timings()]


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


def test_a_far_slower_arm_leaves_after_one_round() -> None:
    race = run([steady(100), steady(400)])

    assert samples(race) == [LOOKS[0], 2]
    assert race.verdicts()[1] is Verdict.WIN


def test_a_clearly_slower_arm_leaves_after_two_rounds() -> None:
    assert samples(run([steady(180), steady(100)])) == [4, LOOKS[0]]


def test_an_arm_that_one_disturbance_hit_twice_stays() -> None:
    race = Race(2)
    race.add({0: (7.6, 7.6), 1: (33.0, 465.0)})
    while race.active:
        race.add({arm: (7.6, 7.6) if arm == 0 else (5.0, 5.0) for arm in race.active})

    slow, fast = race.timings()
    assert fast.median_us == 5.0 < slow.median_us


def test_close_arms_are_distinguished() -> None:
    race = run([steady(100), steady(103)])

    assert race.verdicts()[1] is Verdict.WIN
    assert max(samples(race)) < MOST_SAMPLES


def test_equal_arms_are_a_tie() -> None:
    assert Verdict.TIE in run([steady(100), steady(100.1)]).verdicts()


def test_noisy_arms_are_unsure_after_the_most_samples() -> None:
    race = run([steady(100, noise=0.2), steady(101, noise=0.2)])

    assert samples(race) == [MOST_SAMPLES] * 2
    assert set(race.verdicts()) == {Verdict.UNSURE}


def test_a_drifting_clock_changes_no_verdict() -> None:
    """Both arms become 2 % slower a round, a hundred times the difference that matters."""
    race = run([steady(100, 0.001), steady(104, 0.001)], drift=0.02)

    assert race.verdicts()[1] is Verdict.WIN


def test_a_cheap_arm_stays_until_its_own_interval_is_narrow() -> None:
    cheap, costly = run([steady(6, 0.02)]), run([steady(6000, 0.02)])

    assert samples(cheap)[0] > samples(costly)[0] == LOOKS[0]


def test_a_stopped_race_keeps_what_it_has() -> None:
    race = Race(2)
    race.add({0: (1.0, 1.1), 1: (1.0, 1.1)})
    race.stop()

    assert race.active == ()
    assert samples(race) == [2, 2]


@pytest.mark.parametrize("make", [steady, spiky], ids=["steady", "spiky"])
@pytest.mark.parametrize("ratio", [1.0, 1.0099])
def test_arms_within_the_margin_are_called_different_in_at_most_a_twentieth(
    make: Callable[[float], Draw], ratio: float
) -> None:
    """The looks share the probability of an error."""
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
def test_every_race_ends_and_the_fastest_is_sampled_most(latencies: list[float], seed: int) -> None:
    race = run([steady(us) for us in latencies], seed)

    taken = samples(race)
    medians = [timing.median_us for timing in race.timings()]
    assert max(taken) <= MOST_SAMPLES
    assert taken[medians.index(min(medians))] >= LOOKS[0]
    assert all(count % 2 == 0 and count >= 2 for count in taken)
