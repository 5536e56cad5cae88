"""Verdicts on cells (an arm on a batch): faster, slower, same or unclear, and why.

The interval of a measured median covers the variation within one run. Runs differ by more: three
runs of the same versions on one H100 (1159 cells each) differed by 0.3 % at the median and by up to
2.1 % in 95 % of the cells. A few batches differed by 5 to 11 %, in all arms alike, because the
GPU's clock was different at that moment. So every interval is widened by the difference between
runs, and a batch whose arms all moved alike, while similar batches did not, counts as unclear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import dist, exp, hypot, log
from statistics import fmean, median

from nsa_tune._errors import BatchError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

SAME_WITHIN = 0.03
"""Relative difference up to which two times count as the same."""

_BETWEEN_RUNS = 0.02
"""Relative difference between two runs of the same versions that 95 % of the cells stay within."""
_NEIGHBOURS = 4
"""Number of similar batches that a batch is compared with."""

Rows = Mapping[tuple[str, str, str], Measurement]
"""Measurements by point, batch and arm."""


class CellVerdict(StrEnum):
    """The second side of a cell, compared with the first."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"
    BROKEN = "broken"
    """Failed or wrong on the second side only."""
    MENDED = "mended"
    ONLY_BEFORE = "only before"
    """Measured on the first side only."""
    ONLY_AFTER = "only after"


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """One arm on one batch, on both sides."""

    point: str
    batch: str
    arm: str
    verdict: CellVerdict
    reason: str
    ratio: float | None
    """The second side's time over the first's; None unless both succeeded."""
    low: float | None
    high: float | None
    """95 % interval of the ratio, widened by the difference between runs."""
    before_us: float | None
    after_us: float | None


def judge(
    ours: Rows, theirs: Rows, points: Mapping[str, Point], setting: Setting,
    *, one_gpu: bool = True,
) -> list[JudgedCell]:  # fmt: skip
    """Every cell that both sides have, in the order of the first side.

    With `one_gpu`, a batch that moved as a whole while similar ones did not is unclear. Between
    different GPUs such differences are real.
    """
    both = [place for place in ours if place in theirs]
    lone = _lone_batches(ours, theirs, both, points, setting) if one_gpu else {}
    return [_judged(place, ours[place], theirs[place], lone.get(place[:2])) for place in both]


def _judged(
    place: tuple[str, str, str], one: Measurement, other: Measurement, lone: float | None
) -> JudgedCell:  # fmt: skip
    before, after = one.latency_us, other.latency_us
    ok = (one.status is Status.OK, other.status is Status.OK)
    if not all(ok) or before is None or after is None:
        verdict, reason = {
            (True, False): (CellVerdict.BROKEN, f"{other.status}: {other.reason}"),
            (False, True): (CellVerdict.MENDED, f"was {one.status}: {one.reason}"),
        }.get(ok, (CellVerdict.SAME, f"{one.status} on both sides: {other.reason}"))
        return JudgedCell(*place, verdict, reason, None, None, None, before, after)
    half = hypot(one.noise, other.noise, _BETWEEN_RUNS)
    moved = log(after / before)
    low, high = exp(moved - half), exp(moved + half)
    verdict, reason = _verdict(moved, half, lone)
    return JudgedCell(*place, verdict, reason, exp(moved), low, high, before, after)


def _verdict(moved: float, half: float, lone: float | None) -> tuple[CellVerdict, str]:
    edge = log(1 + SAME_WITHIN)
    between = f"{exp(moved):.3f}x, between {exp(moved - half):.3f}x and {exp(moved + half):.3f}x"
    if abs(moved) <= edge:
        if half <= 2 * edge:
            return CellVerdict.SAME, f"{between}: within {percent(SAME_WITHIN)}"
        return CellVerdict.UNCLEAR, f"{between}: too noisy to call it the same"
    if abs(moved) <= half:
        return CellVerdict.UNCLEAR, f"{between}: not beyond the noise"
    if lone is not None:
        return CellVerdict.UNCLEAR, (
            f"{between}: but all arms of this batch moved alike, by about {100 * lone:+.1f} %, and "
            "similar batches did not: the GPU was in another state"
        )
    verdict = CellVerdict.FASTER if moved < 0 else CellVerdict.SLOWER
    return verdict, f"{between}: beyond the noise and beyond {percent(SAME_WITHIN)}"


def percent(share: float) -> str:
    """A share as text: ``3 %``."""
    return f"{100 * share:.3g} %"


# --- batches that moved as a whole


def _lone_batches(
    ours: Rows, theirs: Rows, both: Sequence[tuple[str, str, str]], points: Mapping[str, Point],
    setting: Setting,
) -> dict[tuple[str, str], float]:  # fmt: skip
    """(point, batch) to its relative shift, if all its arms share it and similar batches do not."""
    moves: dict[tuple[str, str], list[float]] = {}
    for place in both:
        before, after = ours[place].latency_us, theirs[place].latency_us
        if before is not None and after is not None:
            moves.setdefault(place[:2], []).append(log(after / before))
    lone: dict[tuple[str, str], float] = {}
    for name in dict.fromkeys(point for point, _ in moves):
        point = points.get(name)
        if point is None:
            continue
        shifts = {batch: fmean(some) for (owner, batch), some in moves.items() if owner == name}
        places = _places(point, setting, shifts)
        for batch, shift in shifts.items():
            own = moves[name, batch]
            alike = len(own) > 1 and max(own) - min(own) <= SAME_WITHIN
            if alike and abs(shift) > SAME_WITHIN and batch in places:
                around = median(_around(batch, places, shifts))
                if abs(shift - around) > SAME_WITHIN:
                    lone[name, batch] = exp(shift) - 1
    return lone


_Place = tuple[int, tuple[float, ...]]


def _places(point: Point, setting: Setting, batches: Mapping[str, float]) -> dict[str, _Place]:
    """Regime and coordinates of each batch; batches without are left out."""
    features, found = point.features(setting), dict[str, _Place]()
    for word in batches:
        try:
            at = features.position(Batch.parse(word))
        except (BatchError, ArithmeticError, ValueError):
            continue
        found[word] = at.regime, at.coordinates
    return found


def _around(batch: str, places: Mapping[str, _Place], shifts: Mapping[str, float]) -> list[float]:
    """The shifts of the nearest batches in the same regime; 0 without any."""
    regime, where = places[batch]
    near = sorted(
        (dist(where, other), word)
        for word, (level, other) in places.items()
        if level == regime and word != batch
    )
    return [shifts[word] for _, word in near[:_NEIGHBOURS]] or [0.0]


# --- cells of one side


def one_sided(
    ours: Rows, theirs: Rows, points: Mapping[str, Point], before: Setting, after: Setting
) -> Iterator[JudgedCell]:
    """The cells that only the first side has, then those that only the second has."""
    for verdict, here, there, other in (
        (CellVerdict.ONLY_BEFORE, ours, theirs, after),
        (CellVerdict.ONLY_AFTER, theirs, ours, before),
    ):
        for place, row in here.items():
            if place not in there:
                times = (row.latency_us, None)
                one, two = times if verdict is CellVerdict.ONLY_BEFORE else times[::-1]
                reason = _reason(*place, points, other)
                yield JudgedCell(*place, verdict, reason, None, None, None, one, two)


def _reason(point: str, batch: str, arm: str, points: Mapping[str, Point], other: Setting) -> str:
    """Why the other side lacks a cell: a limit forbids the arm there, or it was not measured."""
    declared = points[point].arms if point in points else ()
    for one in (one for one in declared if one.name == arm):
        try:
            limit = one.allowed(Batch.parse(batch), other)
        except BatchError:
            limit = None
        if limit is not None:
            return f"not allowed on the other side: {limit}"
    return "not measured on the other side"
