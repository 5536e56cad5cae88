"""Roofline: the flops and bytes a second that arms achieve, and what the device reaches.

The ceilings are measurements of the table like any other, of a point called "roofline":

    batch copy:BYTES      arm copy                       BYTES are read, and as many written
    batch matmul:MxNxK    arm matmul_bf16, matmul_fp8    one matrix product

No data sheet is used: a table without these rows gets achieved rates, but no ceilings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.reports.analysis.work import Work, work_of

if TYPE_CHECKING:
    from nsa_tune.backend.costmodel.policy import Policy
    from nsa_tune.backend.types.batch import Batch

POINT = "roofline"
_COPY = re.compile(r"copy:(\d{1,18})")
_MATMUL = re.compile(r"matmul:(\d{1,9})x(\d{1,9})x(\d{1,9})")
_PRECISION = {"matmul_bf16": "bf16", "matmul_fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates that were measured on the device."""

    bytes_per_s: float
    flops_per_s: dict[str, float]
    """By precision: "bf16", "fp8"."""

    def at(self, intensity: float, precision: str) -> float | None:
        """The ceiling, in flops a second, at `intensity` flops a byte; None if not measured."""
        peak = self.flops_per_s.get(precision)
        return None if peak is None else min(intensity * self.bytes_per_s, peak)


@dataclass(frozen=True, slots=True)
class Achieved:
    """One arm on one batch."""

    point: str
    arm: str
    batch: str
    precision: str
    intensity: float
    """Flops a byte."""
    flops_per_s: float
    bytes_per_s: float
    share: float | None
    """Achieved rate over the ceiling at this intensity; None without a measured ceiling."""
    bound: str
    """The lower ceiling at this intensity, "memory" or "compute"; empty without one."""


def share_text(share: float | None) -> str:
    """A share of the ceiling as text."""
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def ceilings_of(measurements: Iterable[Measurement]) -> Ceilings | None:
    """The ceilings from `measurements`; None unless they have a copy and a matrix product."""
    copied = 0.0
    computed: dict[str, float] = {}
    for row in measurements:
        if row.point != POINT or row.status is not Status.OK or row.latency_us is None:
            continue
        seconds = row.latency_us / 1e6
        if row.arm == "copy" and (match := _COPY.fullmatch(row.batch)):
            copied = max(copied, 2 * int(match[1]) / seconds)
        elif row.arm in _PRECISION and (match := _MATMUL.fullmatch(row.batch)):
            m, n, k = map(int, match.groups())
            name = _PRECISION[row.arm]
            computed[name] = max(computed.get(name, 0.0), 2 * m * n * k / seconds)
    return Ceilings(copied, computed) if copied and computed else None


def achieved_of(
    policy: Policy,
    batches: Mapping[str, Batch],
    rows: Iterable[Measurement],
    ceilings: Ceilings | None,
) -> tuple[Achieved, ...]:
    """The achieved rates of every successful measurement whose work is known."""
    found = []
    for row in rows:
        batch = batches.get(row.batch)
        if batch is None or row.status is not Status.OK or row.latency_us is None:
            continue
        work = work_of(row.point, row.arm, batch, policy.setting)
        if work is not None:
            found.append(_achieved(row, row.latency_us / 1e6, work, ceilings))
    return tuple(found)


def _achieved(row: Measurement, seconds: float, work: Work, ceilings: Ceilings | None) -> Achieved:
    rate = work.flops / seconds
    share, bound = None, ""
    roof = None if ceilings is None else ceilings.at(work.intensity, work.precision)
    if ceilings is not None and roof is not None:
        share = rate / roof
        bound = "memory" if roof < ceilings.flops_per_s[work.precision] else "compute"
    return Achieved(
        row.point, row.arm, row.batch, work.precision, work.intensity, rate,
        work.moved / seconds, share, bound,
    )  # fmt: skip
