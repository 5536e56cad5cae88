"""An arm's surface: exact where it was measured, sensible between and outside."""

from __future__ import annotations

from dataclasses import replace
from math import log2, sin
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.surface import Estimate, Places, Surface
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Measurement
from tests.backend.fake_point import BATCHES, FAKE, SETTING, linear, measured

_ARM = "mla/wide"
FEATURES = FAKE.features(SETTING)


def _bumpy(batch: Batch) -> float:
    """Up to 20 % off from linear, changing slowly over the octaves."""
    bump = 0.2 * sin(log2(batch.q_tokens) / 2 + log2(batch.kv_tokens) / 3)
    return linear(0.5, 0.02, 10)(batch) * (1 + bump)


def _samples(rows: list[Measurement]) -> list[tuple[Batch, Measurement]]:
    return [(Batch.parse(row.batch), row) for row in rows]


def _surface(rows: list[Measurement]) -> Surface:
    return Surface.fit(FEATURES, FAKE.arm(_ARM), _samples(rows))


def _estimate(surface: Surface, batch: Batch) -> Estimate | None:
    return surface.estimate(FEATURES.position(batch))


BUMPY = _surface(measured({_ARM: _bumpy}))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_measured_batch_gets_what_was_measured(batch: Batch) -> None:
    estimate = _estimate(BUMPY, batch)

    assert estimate is not None
    assert estimate.latency_us == pytest.approx(_bumpy(batch), rel=1e-9)
    assert estimate.low_us == pytest.approx(0.999 * _bumpy(batch), rel=1e-4)
    assert estimate.high_us == pytest.approx(1.001 * _bumpy(batch), rel=1e-4)
    assert not estimate.extrapolated


@given(st.integers(256, 8192), st.integers(1, 4096))
@settings(max_examples=100)
def test_between_measured_batches_the_estimate_is_near(prefix: int, new: int) -> None:
    batch = Batch.extend([prefix], [new])

    estimate = _estimate(BUMPY, batch)

    assert estimate is not None
    assert estimate.low_us < estimate.latency_us < estimate.high_us
    assert estimate.latency_us == pytest.approx(_bumpy(batch), rel=0.12)


@given(st.integers(0, 8192), st.integers(1, 4096))
@settings(max_examples=50)
def test_a_linear_time_is_found_everywhere(prefix: int, new: int) -> None:
    true = linear(0.5, 0.02, 10)
    surface = _LINEAR

    estimate = _estimate(surface, Batch.extend([prefix], [new]))

    assert estimate is not None
    assert estimate.latency_us == pytest.approx(true(Batch.extend([prefix], [new])), rel=1e-3)


_LINEAR = _surface(measured({_ARM: linear(0.5, 0.02, 10)}))


@pytest.mark.parametrize(
    "batch",
    [
        Batch.extend([200_000], [64]),
        Batch.extend([1_000_000], [64]),
        Batch.extend([60_000], [50_000]),
    ],
    ids=str,
)
def test_outside_the_linear_model_goes_on_with_a_wider_interval(batch: Batch) -> None:
    inside, outside = Batch.extend([3000], [700]), _estimate(BUMPY, batch)
    within = _estimate(BUMPY, inside)

    assert outside is not None
    assert within is not None
    assert outside.extrapolated
    assert not within.extrapolated
    assert outside.latency_us == pytest.approx(linear(0.5, 0.02, 10)(batch), rel=0.45)
    assert outside.high_us / outside.latency_us > within.high_us / within.latency_us


def test_the_further_outside_the_wider_the_interval() -> None:
    widths = []
    for prefix in (20_000, 80_000, 320_000):
        estimate = _estimate(BUMPY, Batch.extend([prefix], [64]))
        assert estimate is not None
        widths.append(estimate.high_us / estimate.low_us)
    assert widths == sorted(widths)
    assert len(set(widths)) == 3


def test_a_hole_in_the_sweep_counts_as_outside() -> None:
    corners = [Batch.extend([p], [n]) for p in (64, 65536) for n in (1, 2048)]
    surface = _surface(measured({_ARM: _bumpy}, corners))

    estimate = _estimate(surface, Batch.extend([2048], [45]))

    assert estimate is not None
    assert estimate.extrapolated


def test_a_regime_with_too_few_points_is_unknown() -> None:
    cold = [batch for batch in BATCHES if batch.prefix_tokens == 0]
    warm = [batch for batch in BATCHES if batch.prefix_tokens][:2]
    surface = _surface(measured({_ARM: _bumpy}, cold + warm))

    assert _estimate(surface, Batch.extend([0], [100])) is not None
    assert _estimate(surface, Batch.extend([100], [100])) is None


def test_nothing_measured_is_no_surface() -> None:
    surface = _surface([])

    assert _estimate(surface, BATCHES[0]) is None
    assert surface.spread == float("inf")


def test_the_order_of_the_samples_does_not_matter() -> None:
    rows = measured({_ARM: _bumpy})
    shuffled = rows[:]
    Random(7).shuffle(shuffled)
    batches = [Batch.extend([p], [n]) for p in (0, 300, 5000) for n in (3, 500, 4000)]

    first = [_estimate(_surface(rows), batch) for batch in batches]
    second = [_estimate(_surface(shuffled), batch) for batch in batches]

    assert first == second


def test_what_was_asked_before_does_not_matter() -> None:
    fresh, used = _surface(measured({_ARM: _bumpy})), _surface(measured({_ARM: _bumpy}))
    asked = Batch.extend([777], [333])
    for prefix in range(0, 9000, 111):
        _estimate(used, Batch.extend([prefix], [1 + prefix % 1000]))

    assert _estimate(fresh, asked) == _estimate(used, asked)


def test_the_lookup_by_cells_finds_the_nearest_places() -> None:
    random = Random(3)
    locations = [tuple(random.uniform(0, 14) for _ in range(3)) for _ in range(200)]
    places = Places(locations)
    for _ in range(200):
        where = tuple(random.uniform(0, 14) for _ in range(3))
        found = {i for i, weight in places.around(where).weights if weight > 0}
        inside = tuple(
            min(max(x, min(column)), max(column))
            for x, column in zip(where, zip(*locations, strict=True), strict=True)
        )
        distances = [sum((a - b) ** 2 for a, b in zip(inside, p, strict=True)) for p in locations]
        assert found == set(sorted(range(200), key=distances.__getitem__)[: len(found)])


def test_two_batches_at_one_location_are_averaged() -> None:
    # Equal sums: the made-up point cannot tell these apart.
    rows = measured({_ARM: linear(0.5, 0.02, 10)})
    one, two = Batch.extend([100], [28]), Batch.extend([50, 50], [14, 14])
    time = linear(0.5, 0.02, 10)(one)
    rows += [
        replace(rows[0], batch=str(one), latency_us=time * 0.8, low_us=None, high_us=None),
        replace(rows[0], batch=str(two), latency_us=time / 0.8, low_us=None, high_us=None),
    ]

    estimate = _estimate(_surface(rows), one)

    assert estimate is not None
    assert estimate.latency_us == pytest.approx(time, rel=0.01)


def test_the_spread_says_how_far_off_points_are_that_were_left_out() -> None:
    finer = [Batch.extend([64 * 2**i], [2**j]) for i in range(8) for j in range(13)]
    coarser = finer[::3]

    fine, coarse = (_surface(measured({_ARM: _bumpy}, some)) for some in (finer, coarser))

    assert _LINEAR.spread < 1e-3
    assert 0.002 < fine.spread < coarse.spread < 0.2
