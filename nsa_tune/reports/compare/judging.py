"""One cell against another: faster, slower, same or unclear, and why.

The interval of a median says how it varies within one run. Between runs it varies more: on one
H100, three runs of the same versions (1159 cells each) differed by 0.3 % in the median, by up to
2.1 % in 95 % of the cells, and in a few batches by 5 to 11 %, then in all arms alike, because the
device's clock was elsewhere. So every interval is widened by what runs differ by, and a batch that
moved as a whole, while batches like it did not, speaks of the device and not of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import dist, exp, hypot, log
from statistics import fmean, median
from typing import TYPE_CHECKING

from nsa_tune._errors import BatchError
from nsa_tune.backend.costmodel.surface import features_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.types.point import Point, Setting

__all__ = ["SAME_WITHIN", "Judged", "Rows", "Verdict", "judge", "percent"]

SAME_WITHIN = 0.03
"""Relative difference up to which two times count as the same."""

_BETWEEN_RUNS = 0.02
"""Relative difference that two runs of the same versions have in 95 % of the cells."""
_NEIGHBOURS = 4
"""Batches like a batch that are asked whether they moved with it."""

Rows = Mapping[tuple[str, str, str], Measurement]
"""Measurements by point, batch and arm."""


class Verdict(StrEnum):
    """How the second side stands to the first."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNCLEAR = "unclear"
    BROKEN = "broken"
    """It failed, or is wrong, and was not before."""
    MENDED = "mended"
    ONLY_BEFORE = "only before"
    """The second side has no such cell."""
    ONLY_AFTER = "only after"


@dataclass(frozen=True, slots=True)
class Judged:
    """One arm on one batch, on both sides."""

    point: str
    batch: str
    arm: str
    verdict: Verdict
    reason: str
    ratio: float | None
    """The second side's time over the first's; None unless both succeeded."""
    low: float | None
    high: float | None
    """95 % interval of the ratio, with what two runs differ by."""
    before_us: float | None
    after_us: float | None


def judge(
    ours: Rows, theirs: Rows, points: Mapping[str, Point], setting: Setting,
    same_within: float = SAME_WITHIN, *, one_gpu: bool = True,
) -> list[Judged]:  # fmt: skip
    """Every cell that both sides have, in the order of the first.

    Between two GPUs a batch may well move otherwise than its neighbours: then `one_gpu` is false.
    """
    both = [place for place in ours if place in theirs]
    lone = _lone_batches(ours, theirs, both, points, setting, same_within) if one_gpu else {}
    return [
        _judged(place, ours[place], theirs[place], lone.get(place[:2]), same_within)
        for place in both
    ]


def _judged(
    place: tuple[str, str, str], one: Measurement, other: Measurement, lone: float | None,
    same_within: float,
) -> Judged:  # fmt: skip
    before, after = one.latency_us, other.latency_us
    ok = (one.status is Status.OK, other.status is Status.OK)
    if not all(ok) or before is None or after is None:
        verdict, reason = {
            (True, False): (Verdict.BROKEN, f"{other.status}: {other.reason}"),
            (False, True): (Verdict.MENDED, f"was {one.status}: {one.reason}"),
        }.get(ok, (Verdict.SAME, f"{one.status} on both sides: {other.reason}"))
        return Judged(*place, verdict, reason, None, None, None, before, after)
    half = hypot(_half(one), _half(other), _BETWEEN_RUNS)
    moved = log(after / before)
    low, high = exp(moved - half), exp(moved + half)
    verdict, reason = _verdict(moved, half, lone, same_within)
    return Judged(*place, verdict, reason, exp(moved), low, high, before, after)


def _half(row: Measurement) -> float:
    """Half the interval of a time, as a logarithm."""
    assert row.latency_us is not None
    low, high = row.low_us or row.latency_us, row.high_us or row.latency_us
    return max(log(high / row.latency_us), log(row.latency_us / low), 0.0)


def _verdict(
    moved: float, half: float, lone: float | None, same_within: float
) -> tuple[Verdict, str]:
    edge = log(1 + same_within)
    between = f"{exp(moved):.3f}x, between {exp(moved - half):.3f}x and {exp(moved + half):.3f}x"
    if abs(moved) <= edge:
        if half <= 2 * edge:
            return Verdict.SAME, f"{between}: within {percent(same_within)}"
        return Verdict.UNCLEAR, f"{between}: too noisy to call it the same"
    if abs(moved) <= half:
        return Verdict.UNCLEAR, f"{between}: the intervals leave it open"
    if lone is not None:
        return Verdict.UNCLEAR, (
            f"{between}: but every arm of this batch moved by about {100 * lone:+.1f} %, and "
            "batches like it did not: the device was in another state"
        )
    verdict = Verdict.FASTER if moved < 0 else Verdict.SLOWER
    return verdict, f"{between}: beyond the noise and beyond {percent(same_within)}"


def percent(share: float) -> str:
    """A share in words: ``3 %``."""
    return f"{100 * share:.3g} %"


# --- batches that moved as a whole


def _lone_batches(
    ours: Rows, theirs: Rows, both: Sequence[tuple[str, str, str]], points: Mapping[str, Point],
    setting: Setting, same_within: float,
) -> dict[tuple[str, str], float]:  # fmt: skip
    """(point, batch) to the shift that all its arms, and none of its neighbours, share."""
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
            alike = len(own) > 1 and max(own) - min(own) <= same_within
            if alike and abs(shift) > same_within and batch in places:
                around = median(_around(batch, places, shifts))
                if abs(shift - around) > same_within:
                    lone[name, batch] = exp(shift) - 1
    return lone


_Place = tuple[int, tuple[float, ...]]


def _places(point: Point, setting: Setting, batches: Mapping[str, float]) -> dict[str, _Place]:
    """Where each batch lies; those that the point cannot place are left out."""
    found: dict[str, _Place] = {}
    for word in batches:
        try:
            features = features_of(point, Batch.parse(word), setting)
        except (BatchError, ArithmeticError, ValueError):
            continue
        found[word] = features.sheet, features.where
    return found


def _around(batch: str, places: Mapping[str, _Place], shifts: Mapping[str, float]) -> list[float]:
    """How the nearest batches on the same sheet moved; 0 where there is none."""
    sheet, where = places[batch]
    near = sorted(
        (dist(where, other), word)
        for word, (level, other) in places.items()
        if level == sheet and word != batch
    )
    return [shifts[word] for _, word in near[:_NEIGHBOURS]] or [0.0]
