"""One cell against another."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.reports.compare.cell_verdicts import (
    SAME_WITHIN,
    CellVerdict,
    JudgedCell,
    judge,
    percent,
)
from tests.reports.synthetic import H100, measured, toy_point

POINT = toy_point()
SETTING = Setting(PROFILES["deepseek-v3.2"], 128, KVLayout.FP8_PACKED, H100)
GRID = [Batch.extend([0], [2**k]) for k in range(13)]


def _rows(*rows: Measurement) -> dict[tuple[str, str, str], Measurement]:
    return {(row.point, row.batch, row.arm): row for row in rows}


def _one(ratio: float, spread: float = 0.001) -> JudgedCell:
    """A cell whose time after is `ratio` of that before."""
    before = measured("toy", GRID[5], "flat/a", 100.0, spread)
    after = measured("toy", GRID[5], "flat/a", 100.0 * ratio, spread)
    (judged,) = judge(_rows(before), _rows(after), {"toy": POINT}, SETTING)
    return judged


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [
        (1.0, 0.001, CellVerdict.SAME),
        (1.029, 0.001, CellVerdict.SAME),
        (0.972, 0.001, CellVerdict.SAME),
        (1.04, 0.001, CellVerdict.SLOWER),
        (0.96, 0.001, CellVerdict.FASTER),
        (1.04, 0.05, CellVerdict.UNCLEAR),
        (1.3, 0.05, CellVerdict.SLOWER),
        (1.0, 0.2, CellVerdict.UNCLEAR),
    ],
)
def test_a_verdict_follows_from_ratio_and_interval(
    ratio: float, spread: float, verdict: CellVerdict
) -> None:
    judged = _one(ratio, spread)

    assert judged.verdict is verdict
    assert judged.ratio == pytest.approx(ratio)
    assert f"{ratio:.3f}x, between " in judged.reason


def test_two_runs_differ_by_more_than_their_intervals_say() -> None:
    judged = _one(1.04, spread=0.0)

    assert judged.low == pytest.approx(1.04 / 1.0202, rel=1e-3)


@given(st.floats(0.2, 5), st.floats(0, 0.3))
def test_turning_the_sides_around_turns_the_verdict_around(ratio: float, spread: float) -> None:
    # On the very edge of "the same" the rounding of 1 / ratio decides.
    assume(abs(abs(log(ratio)) - log(1 + SAME_WITHIN)) > 1e-9)
    turned = {CellVerdict.FASTER: CellVerdict.SLOWER, CellVerdict.SLOWER: CellVerdict.FASTER}
    one, other = _one(ratio, spread), _one(1 / ratio, spread)

    assert other.verdict is turned.get(one.verdict, one.verdict)


def _statuses(before: Status, after: Status) -> JudgedCell:
    row = measured("toy", GRID[5], "flat/a", 100.0, 0.001)
    bad = Measurement("toy", row.batch, row.arm, Status.FAILED, reason="boom")
    sides = [row if status is Status.OK else replace(bad, status=status)
             for status in (before, after)]  # fmt: skip
    return judge(_rows(sides[0]), _rows(sides[1]), {"toy": POINT}, SETTING)[0]


def test_a_new_failure_is_broken_and_an_old_one_mended() -> None:
    broken, mended = _statuses(Status.OK, Status.WRONG), _statuses(Status.FAILED, Status.OK)

    assert (broken.verdict, broken.reason) == (CellVerdict.BROKEN, "wrong: boom")
    assert (mended.verdict, mended.reason) == (CellVerdict.MENDED, "was failed: boom")
    assert broken.ratio is None
    assert _statuses(Status.FAILED, Status.FAILED).verdict is CellVerdict.SAME


# --- batches that moved as a whole


def _sweep(
    moved: dict[int, float], arms: tuple[str, ...] = ("steep/a", "flat/a")
) -> list[JudgedCell]:
    """The grid on both sides; of batch i all `arms` take `moved[i]` of their time before."""
    before, after = [], []
    for i, batch in enumerate(GRID):
        for arm in ("steep/a", "flat/a"):
            factor = moved.get(i, 1.0) if arm in arms else 1.0
            before.append(measured("toy", batch, arm, 100.0, 0.001))
            after.append(measured("toy", batch, arm, 100.0 * factor, 0.001))
    return judge(_rows(*before), _rows(*after), {"toy": POINT}, SETTING)


def _verdicts(judged: list[JudgedCell], batch: Batch) -> set[CellVerdict]:
    return {one.verdict for one in judged if one.batch == str(batch)}


def test_a_batch_that_moved_alone_and_as_a_whole_is_unclear() -> None:
    judged = _sweep({6: 1.1})

    assert _verdicts(judged, GRID[6]) == {CellVerdict.UNCLEAR}
    reasons = {one.reason for one in judged if one.batch == str(GRID[6])}
    assert all(
        "all arms of this batch moved alike, by about +10.0 %" in reason for reason in reasons
    )


def test_one_arm_that_moved_alone_is_its_kernels() -> None:
    judged = _sweep({6: 1.1}, arms=("steep/a",))

    assert _verdicts(judged, GRID[6]) == {CellVerdict.SLOWER, CellVerdict.SAME}


def test_a_region_that_moved_is_no_accident() -> None:
    judged = _sweep(dict.fromkeys(range(5, 13), 1.1))

    for batch in GRID[7:]:
        assert _verdicts(judged, batch) == {CellVerdict.SLOWER}


def test_between_two_gpus_a_batch_may_move_alone() -> None:
    rows = [measured("toy", batch, arm, 100.0, 0.001) for batch in GRID
            for arm in ("steep/a", "flat/a")]  # fmt: skip
    after = [replace(row, latency_us=80.0, low_us=80.0, high_us=80.0)
             if row.batch == str(GRID[6]) else row for row in rows]  # fmt: skip

    judged = judge(_rows(*rows), _rows(*after), {"toy": POINT}, SETTING, one_gpu=False)

    assert _verdicts(judged, GRID[6]) == {CellVerdict.FASTER}


def test_a_batch_of_an_unknown_point_is_judged_by_itself() -> None:
    rows = [measured("else", batch, arm, 100.0, 0.001) for batch in GRID[:1] for arm in "ab"]
    after = [replace(row, latency_us=120.0, low_us=120.0, high_us=120.0) for row in rows]

    judged = judge(_rows(*rows), _rows(*after), {}, SETTING)

    assert {one.verdict for one in judged} == {CellVerdict.SLOWER}


def test_a_share_reads_as_per_cent() -> None:
    assert (percent(0.03), percent(0.0125)) == ("3 %", "1.25 %")
