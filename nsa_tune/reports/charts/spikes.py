"""Spikes: single noisy measurements, which must not set the axis of all others.

They stay in the tables and in the tooltips of the winner map; a chart leaves them out and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from nsa_tune.reports.charts.theme import Rows

_FACTOR = 8.0
"""A time so many times those beside it is a spike."""


class Shown(NamedTuple):
    """What a chart draws."""

    rows: dict[str, Rows]
    """Its data sets without spikes."""
    most: float | None
    """The largest value that is drawn; None without any spike."""
    note: str
    """A sentence that names what is not drawn; empty without any spike."""


def calm_curves(data: Mapping[str, Rows]) -> Shown:
    """The data sets of `curves` without spikes and without estimates that follow them."""
    measured = data["measured"]
    spikes = [row for rows in _by_choice(measured) for row in _spikes(rows)]
    rest = [row["us"] for row in measured if row not in spikes]
    if not spikes or not rest:
        return Shown(dict(data), None, "")
    most = max(rest)
    kept = {name: [row for row in rows if row.get("us", 0.0) <= most]
            for name, rows in data.items()}  # fmt: skip
    words = ", ".join(
        f"{row['choice']} {row['us']:.0f} us at {row['x']}" for row in spikes if row["us"] > most
    )
    return Shown(kept, most, f"Not drawn, as noise: {words}." if words else "")


def _by_choice(measured: Rows) -> Iterator[Rows]:
    for choice in dict.fromkeys(row["choice"] for row in measured):
        yield sorted((row for row in measured if row["choice"] == choice), key=itemgetter("x"))


def _spikes(rows: Rows) -> Iterator[dict[str, Any]]:
    """Times far above both neighbours'; at the right end, above what the length explains."""
    for i, row in enumerate(rows):
        beside = [rows[i + 1]["us"]] if i + 1 < len(rows) else []
        if i:
            longer = 1.0 if beside else row["x"] / max(rows[i - 1]["x"], 1)
            beside.append(rows[i - 1]["us"] * longer)
        if beside and row["us"] > _FACTOR * max(beside):
            yield row
