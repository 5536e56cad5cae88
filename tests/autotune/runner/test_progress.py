"""How long a run still takes."""

from __future__ import annotations

from nsa_tune.autotune.runner.progress import RemainingTime


def _after(ends_s: list[float]) -> RemainingTime:
    remaining = RemainingTime()
    for end_s in ends_s:
        remaining.add(end_s)
    return remaining


def test_too_few_batches_say_nothing() -> None:
    assert _after([41.0 + i for i in range(8)]).estimate_s(94) is None


def test_slow_first_batches_do_not_count() -> None:
    """Five batches in 41 s of a start, then ten a second."""
    ends_s = [20.0, 35.0, 38.0, 40.0, 41.0, *(41.0 + i / 10 for i in range(1, 30))]

    estimate_s = _after(ends_s).estimate_s(60)

    assert estimate_s is not None
    assert 5.9 < estimate_s < 6.1


def test_a_batch_that_compiles_now_and_then_does_not_count() -> None:
    ends_s = [float(i) + 30.0 * (i >= 12) for i in range(20)]

    estimate_s = _after(ends_s).estimate_s(10)

    assert estimate_s is not None
    assert 10.0 <= estimate_s < 13.0


def test_several_devices_end_batches_together() -> None:
    ends_s = [float(second) for second in range(10) for _ in range(4)]

    estimate_s = _after(ends_s).estimate_s(40)

    assert estimate_s is not None
    assert 9.0 < estimate_s < 11.0
