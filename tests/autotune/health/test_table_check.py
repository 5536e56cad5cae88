"""The table check: anchor batches are close but no tie, and a table is judged by their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nsa_tune import NoTunedData, UsageError
from nsa_tune.autotune.health import table_check
from nsa_tune.autotune.health.table_check import (
    CheckRequest,
    anchor_jobs,
    compare_anchors,
    drift_of,
)
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.autotune.worker import server
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from nsa_tune.db import places
from nsa_tune.db.checks import failed_checks, read_checks
from nsa_tune.db.exchange import write_text
from nsa_tune.db.reader import read_database
from tests.autotune.fake_point import MANY

REGISTRY = "tests.autotune.fake_point:MANY"
check = partial(table_check.check, registry=REGISTRY)
Machine = Callable[[Mapping[str, float | None]], None]
THEN = {"fast": 100.0, "slow": 120.0}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes every later batch take these microseconds by arm; None lets the arm fail."""

    def becomes(times_us: Mapping[str, float | None]) -> None:
        def measure(
            point: Point, batch: Batch, arms: Sequence[Arm], *_: object
        ) -> list[Measurement]:
            return [_row(point.name, str(batch), arm.name, times_us[arm.name]) for arm in arms]

        monkeypatch.setattr(server, "measure_batch", measure)

    return becomes


def _row(point: str, batch: str, arm: str, us: float | None) -> Measurement:
    if us is None:
        return Measurement(point, batch, arm, Status.FAILED, reason="no such symbol")
    return Measurement(point, batch, arm, Status.OK, us, 0.99 * us, 1.01 * us, 8)


@pytest.fixture
def request_(machine: Machine, tmp_path: Path) -> CheckRequest:
    """A check of a table in which "fast" is faster by a fifth on 40 batches."""
    machine(THEN)
    database = tmp_path / "t.db"
    run(RunRequest(database, "cpu", isolate=False), registry=REGISTRY)
    return CheckRequest(detect.cpu_name(), "tiny", 4, "fp8", database, device="cpu", isolate=False)


def test_a_table_holds_when_its_anchors_repeat(request_: CheckRequest) -> None:
    result = check(request_)

    assert result.check.holds
    assert (result.problems, result.differences, result.not_kept) == ((), (), "")
    assert result.check.drift == 0
    assert len(result.check.anchors) == request_.anchors < 40
    assert all(anchor.there_us == anchor.here_us == THEN for anchor in result.check.anchors)


def test_a_table_of_another_device_is_not_checked_here(request_: CheckRequest) -> None:
    """On a host of different GPUs the one that is measured may not be the one that is asked for."""
    assert request_.database is not None
    (table,) = read_database(request_.database)
    path = request_.database.with_name("other.tsv")
    other = replace(table.device, name="CPU of another host")
    write_text(replace(table, key=replace(table.key, gpu=other.name), device=other), path)

    with pytest.raises(UsageError, match="the table is of 'CPU of another host'"):
        check(replace(request_, gpu=other.name, database=path))


def test_what_a_pass_costs_is_checked_with_the_layers(
    request_: CheckRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of "fast" takes as long as before, and its schedule has become slow."""
    layers = profile_of("tiny").alike

    def measure(point: Point, batch: Batch, arms: Sequence[Arm], *_: object) -> list[Measurement]:
        rows = [_row(point.name, str(batch), arm.name, THEN[arm.name]) for arm in arms]
        return [replace(r, pass_us=30.0 * layers if r.arm == "fast" else None) for r in rows]

    monkeypatch.setattr(server, "measure_batch", measure)
    result = check(request_)

    assert not result.check.holds
    assert "fast was faster, and now takes 8.3% more than slow" in result.problems[0]


def test_the_outcome_is_stored_with_the_table_s_key(request_: CheckRequest) -> None:
    assert request_.database is not None
    result = check(request_)

    assert read_checks(request_.database) == [result.check]
    assert result.check.digest == result.table.key.digest


def test_a_choice_that_became_wrong_is_named(request_: CheckRequest, machine: Machine) -> None:
    machine({"fast": 125.0, "slow": 120.0})
    result = check(request_)

    assert not result.check.holds
    assert "fast was faster, and now takes 4.2% more than slow" in result.problems[0]


def test_a_choice_that_loses_little_is_accepted(request_: CheckRequest, machine: Machine) -> None:
    """Two runs on one machine differ by as much."""
    machine({"fast": 108.0, "slow": 107.0})

    assert check(request_).check.holds


def test_times_that_all_changed_are_a_problem_too(request_: CheckRequest, machine: Machine) -> None:
    machine({"fast": 150.0, "slow": 180.0})
    result = check(request_)

    assert not result.check.holds
    assert result.problems == ("arms take 50% more time than in the table",)


def test_an_arm_that_fails_now_is_named_with_its_reason(
    request_: CheckRequest, machine: Machine
) -> None:
    machine({"fast": 100.0, "slow": None})
    result = check(request_)

    assert not result.check.holds
    assert "slow failed: " in result.problems[0]
    assert "no such symbol" in result.problems[0]


def test_a_dispatcher_finds_a_failed_check(request_: CheckRequest, machine: Machine) -> None:
    assert request_.database is not None
    machine({"fast": 150.0, "slow": 180.0})
    failed = check(request_).check

    def found() -> frozenset[str]:
        assert request_.database is not None
        checks = failed_checks([request_.database], failed.driver, failed.libraries)
        return frozenset(checks)

    assert found() == {failed.digest}
    machine(THEN)
    check(request_)
    assert found() == frozenset()


def test_an_interrupted_check_concludes_nothing(
    request_: CheckRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "measure_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(request_)

    assert request_.database is not None
    assert read_checks(request_.database) == []


def test_a_text_table_is_checked_and_stores_nothing(request_: CheckRequest, tmp_path: Path) -> None:
    table = check(request_).table
    path = tmp_path / "t.tsv"
    write_text(table, path)
    text = CheckRequest(request_.gpu, "tiny", 4, "fp8", path, device="cpu", isolate=False)

    result = check(text)

    assert result.check.holds
    assert "text table" in result.not_kept


def test_an_outcome_that_cannot_be_stored_is_returned_all_the_same(
    request_: CheckRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(places, "default_database", lambda: blocked / "t.db")
    monkeypatch.setenv("NSA_TUNE_DB", str(request_.database))
    elsewhere = CheckRequest(request_.gpu, "tiny", 4, "fp8", device="cpu", isolate=False)

    result = check(elsewhere)

    assert result.check.holds
    assert str(blocked) in result.not_kept


def test_without_a_table_there_is_nothing_to_check(request_: CheckRequest) -> None:
    with pytest.raises(NoTunedData, match="nothing is tuned"):
        check(replace(request_, gpu="NVIDIA Z9000"))


def test_a_table_whose_arms_all_tie_has_nothing_to_compare(
    machine: Machine, tmp_path: Path
) -> None:
    machine({"fast": 100.0, "slow": 101.0})
    database = tmp_path / "t.db"
    run(RunRequest(database, "cpu", isolate=False), registry=REGISTRY)

    with pytest.raises(NoTunedData, match="no batch with two arms"):
        check(CheckRequest(detect.cpu_name(), "tiny", 4, "fp8", database, "cpu", isolate=False))


# --- anchor batches

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
POINT = MANY["runnable"]


def pair(batch: str, fast_us: float, slow_us: float, half_width: float = 0.01) -> list[Measurement]:
    rows = []
    for arm, us in {"fast": fast_us, "slow": slow_us}.items():
        low_us, high_us = (1 - half_width) * us, (1 + half_width) * us
        rows.append(Measurement("runnable", batch, arm, Status.OK, us, low_us, high_us, 8))
    return rows


def word(context: int) -> str:
    return str(Batch.decode([context]))


def test_ties_slow_batches_and_those_with_one_arm_are_no_anchors() -> None:
    rows = [
        *pair(word(10), 100, 101),  # a tie
        *pair(word(20), 9000, 10_000),  # takes too long
        pair(word(30), 100, 110)[0],  # alone
        *pair(word(40), 100, 110),
    ]

    assert [str(job.batch) for job in anchor_jobs([POINT], SETTING, rows, 4)] == [word(40)]


def test_anchors_are_spread_over_the_closest_third() -> None:
    rows = [row for n in range(1, 31) for row in pair(word(10 * n), 100, 106 if n % 3 else 300)]

    found = [job.batch.kv_tokens for job in anchor_jobs([POINT], SETTING, rows, 4)]

    assert len(found) == len(set(found)) == 4
    assert not [tokens for tokens in found if tokens % 30 == 0], "three times as slow is not close"


def test_an_arm_that_a_limit_forbids_is_left_out() -> None:
    many = str(Batch.decode([10] * 5))

    assert list(anchor_jobs([POINT], SETTING, pair(many, 100, 110), 4)) == []


@pytest.mark.parametrize(
    ("fast_us", "half_width", "wrong"),
    [(104.0, 0.01, False), (113.0, 0.01, False), (116.0, 0.01, True), (116.0, 0.05, False)],
)
def test_a_wrong_choice_counts_when_the_intervals_are_apart(
    fast_us: float, half_width: float, wrong: bool
) -> None:
    there = pair(word(10), 100, 110)
    jobs = list(anchor_jobs([POINT], SETTING, there, 1))

    (anchor,) = compare_anchors(jobs, there, pair(word(10), fast_us, 110, half_width))

    assert bool(anchor.problem) is wrong


def test_drift_is_the_median_over_all_arms_and_batches() -> None:
    there = [row for n in (10, 20, 30) for row in pair(word(n), 100, 110)]
    here = [*pair(word(10), 100, 110), *pair(word(20), 120, 132), *pair(word(30), 900, 990)]
    jobs = list(anchor_jobs([POINT], SETTING, there, 3))

    assert drift_of(compare_anchors(jobs, there, here)) == pytest.approx(0.2)
    assert drift_of([]) == 0
