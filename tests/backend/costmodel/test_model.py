"""Latency models, and what a failure says about other batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.model import Box, Failures, boxes, fit
from nsa_tune.backend.types.batch import Batch

_SHAPES = st.tuples(st.integers(1, 9), st.integers(0, 4000), st.integers(1, 4000))


def _batch(sequences: int, prefix: int, new: int) -> Batch:
    return Batch.extend([prefix] * sequences, [new] * sequences).sums


def test_a_linear_time_is_found_with_the_features_it_has() -> None:
    features = [
        (float(q), float(kv), float(q * kv)) for q in (1, 8, 64, 512) for kv in (1, 30, 900)
    ]
    times = [2.0 * q + 30 for q, _, _ in features]

    model = fit(features, times)

    assert model is not None
    assert model.weights == pytest.approx((2, 0, 0, 30), rel=1e-6)
    assert model.weights[1:3] == (0, 0)
    assert model.latency_us((10, 5, 50)) == pytest.approx(50)


def test_too_few_different_batches_are_no_model() -> None:
    assert fit([(1.0,), (2.0,)], [3.0, 4.0]) is None
    assert fit([(1.0,), (2.0,), (2.0,)], [3.0, 4.0, 5.0]) is None


def test_no_batch_is_free() -> None:
    model = fit([(1.0,), (2.0,), (4.0,)], [3.0, 6.0, 12.0])

    assert model is not None
    assert model.latency_us((0.0,)) == pytest.approx(0.03)
    assert model.latency_us((3.0,)) == pytest.approx(9.0, rel=0.01)


def test_batches_on_which_another_arm_is_near_count_more() -> None:
    features, times = [(1.0,), (10.0,), (100.0,)], [11.0, 20.0, 200.0]

    def error(gaps: list[float]) -> float:
        model = fit(features, times, gaps)
        assert model is not None
        return abs(model.latency_us(features[2]) / times[2] - 1)

    assert error([2.0, 2.0, 0.0]) < error([0.0, 0.0, 2.0])


def test_a_failure_forbids_what_is_as_big_or_a_little_smaller() -> None:
    (box,) = boxes([(_batch(4, 1000, 1000), "out of memory")], [_batch(1, 10, 10)])

    assert box.reason == "out of memory"
    assert box.holds(_batch(4, 1000, 1000))
    assert box.holds(_batch(64, 2000, 2000))
    assert box.holds(_batch(4, 800, 800))
    assert not box.holds(_batch(4, 100, 100))
    assert not box.holds(_batch(1, 9000, 9000))


def test_an_arm_that_never_passed_is_forbidden_everywhere() -> None:
    (box,) = boxes([(_batch(4, 1000, 1000), "no kernel image")], [])

    assert box.holds(_batch(1, 0, 1))


def test_a_failure_below_a_success_is_not_that_of_everything_bigger() -> None:
    (box,) = boxes([(_batch(1, 100, 100), "timeout")], [_batch(1, 1000, 1000)])

    assert box.holds(_batch(1, 100, 100))
    assert not box.holds(_batch(1, 1000, 1000))


@given(
    st.lists(_SHAPES, min_size=1, max_size=8), st.lists(_SHAPES, max_size=8)
)  # fmt: skip
def test_boxes_hold_every_failure_and_no_success(
    failed: list[tuple[int, int, int]], passed: list[tuple[int, int, int]]
) -> None:
    bad, good = [_batch(*one) for one in failed], [_batch(*one) for one in passed]
    found = boxes([(batch, "no") for batch in bad], good)

    sums = {(b.batch_size, b.q_tokens, b.kv_tokens, b.max_kv) for b in bad}
    for batch in bad:
        assert any(box.holds(batch) for box in found)
    for batch in good:
        if (batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv) not in sums:
            assert not any(box.holds(batch) for box in found)


def test_a_wrong_output_forbids_everything() -> None:
    box = Box((1, 1, 1, 1), (None, 9, None, None), "too many rows")
    batch = _batch(1, 0, 5)

    assert Failures(None, {0: (box,)}).reason(0, batch) == "too many rows"
    assert Failures(None, {0: (box,)}).reason(0, _batch(1, 0, 10)) is None
    assert Failures(None, {0: (box,)}).reason(1, batch) is None
    assert Failures("wrong output", {}).reason(7, batch) == "wrong output"
