"""Quarantine: three lost workers, or three failures without a success."""

from __future__ import annotations

from collections.abc import Iterable

from nsa_tune.autotune.runner.quarantine import Quarantine
from nsa_tune.backend.types.records import Measurement, Status
from tests.records import failed, ok

BATCHES = [f"extend:0+{new}" for new in range(1, 10)]
NO_ROOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate"


def _failing(count: int, reason: str = "RuntimeError: no", arm: str = "mla") -> list[Measurement]:
    """`arm` fails on so many batches, on each of which another arm succeeds."""
    return [
        row for batch in BATCHES[:count] for row in (failed(batch, arm, reason), ok(batch, "mha"))
    ]


def _quarantined(rows: Iterable[Measurement]) -> list[str]:
    return [arm.arm for arm in Quarantine(rows).arms]


def test_three_failures_without_a_success_quarantine_an_arm() -> None:
    assert _quarantined(_failing(2)) == []
    assert _quarantined(_failing(3)) == ["mla"]


def test_a_wrong_answer_is_a_failure() -> None:
    wrong = Measurement("prefill", BATCHES[0], "mla", Status.WRONG, error=1.0, reason="wrong")

    assert _quarantined([*_failing(2), wrong]) == ["mla"]


def test_an_arm_that_succeeded_once_is_not_quarantined_for_failing() -> None:
    assert _quarantined([ok("extend:0+99", "mla"), *_failing(9)]) == []


def test_three_lost_workers_quarantine_an_arm_whatever_succeeded() -> None:
    quarantine = Quarantine([ok("extend:0+99", "mla")])
    for batch in BATCHES[:2]:
        assert quarantine.note([failed(batch, "mla", "killed by SIGSEGV")], "mla") == []

    (named,) = quarantine.note([failed(BATCHES[2], "mla", "killed by SIGSEGV")], "mla")

    assert (named.arm, named.reason) == ("mla", "killed by SIGSEGV")


def test_a_batch_on_which_every_arm_fails_says_nothing_of_an_arm() -> None:
    rows = [failed(batch, arm, "no inputs") for batch in BATCHES for arm in ("mla", "mha")]

    assert _quarantined(rows) == []


def test_missing_memory_does_not_count() -> None:
    assert _quarantined(_failing(5, NO_ROOM)) == []


def test_arms_are_counted_separately() -> None:
    assert _quarantined([*_failing(2), failed(BATCHES[2], "other", "no")]) == []


def test_an_arm_is_reported_once_when_it_is_quarantined() -> None:
    quarantine = Quarantine(_failing(2))

    (named,) = quarantine.note(_failing(3)[4:])

    assert (named.point, named.arm, named.reason) == ("prefill", "mla", "RuntimeError: no")
    assert quarantine.note(_failing(4)[6:]) == []
    assert quarantine.holds("prefill", "mla")
    assert not quarantine.holds("prefill", "mha")
