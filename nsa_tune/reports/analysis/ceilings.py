"""Ceilings: the flops and bytes a second that the device reaches.

They are measurements of the table like any other, of a point called "roofline":

    batch copy:BYTES      arm copy                       BYTES are read, and as many written
    batch matmul:MxNxK    arm matmul_bf16, matmul_fp8    one matrix product

No data sheet is used: a table without these rows has no ceilings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nsa_tune.backend.types.records import Measurement, Status

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
