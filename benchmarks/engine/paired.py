"""Statistics of paired samples: medians, ratios to the default, and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean, median
from typing import Any

from nsa_tune.autotune.bench.intervals import interval_of

__all__ = ["MARGIN", "ratio_of", "spread_of", "verdict_of"]

MARGIN = 0.01
_ALPHA = 0.05


def ratio_of(sweeps: Mapping[int, float], default: Mapping[int, float]) -> dict[str, Any] | None:
    """The median of `sweeps` over `default`, pair by pair, with its 95 % interval.

    Both are times by sweep; only sweeps that both have count. The interval inverts the sign test
    and is None below six pairs. None without a pair.
    """
    ratios = [sweeps[i] / default[i] for i in sorted(sweeps.keys() & default.keys())]
    if not ratios:
        return None
    found = interval_of(ratios, _ALPHA)
    return {
        "median": round(median(ratios), 5),
        "interval": None if found is None else [round(end, 5) for end in found],
        "pairs": len(ratios),
    }


def verdict_of(ratio: Mapping[str, Any] | None) -> str:
    """`win`, `tie` or `loss` at 1 %, when the whole interval says so; else `unsure`."""
    if ratio is None or ratio["interval"] is None:
        return "unsure"
    low, high = ratio["interval"]
    if high < 1 - MARGIN:
        return "win"
    if low > 1 + MARGIN:
        return "loss"
    return "tie" if low >= 1 - MARGIN and high <= 1 + MARGIN else "unsure"


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, mean and 90th percentile."""
    ordered = sorted(values)
    return {
        "median": round(median(ordered), 3),
        "mean": round(fmean(ordered), 3),
        "p90": round(ordered[ceil(0.9 * len(ordered)) - 1], 3),
    }
