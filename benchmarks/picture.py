"""Draw docs/crossovers.svg, the README's picture, from the table that ships for an H100.

python -m benchmarks.picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert

from nsa_tune.backend.tables import read_text, shipped
from nsa_tune.reports import build, charts
from nsa_tune.reports.chart_rows import curve_rows, facet_of, map_rows
from nsa_tune.reports.grids import bundles_of

TABLE = "h100-80gb-hbm3_deepseek-v3.2_h128_fp8"
PREFIX = 1024
OUT = Path(__file__).parents[1] / "docs" / "crossovers.svg"


def picture() -> dict[str, Any]:
    """The winner map of one sequence and one of its lines, side by side, as a Vega-Lite spec."""
    (path,) = (path for path in shipped() if path.stem == TABLE)
    (section,) = build([read_text(path)]).sections
    (answer,) = (one for one in section.answers if one.answer.name == "prefill_path")
    lines = bundles_of(answer)[0]
    line = next(one for one in lines if one.slice.fixed[-1][1] == PREFIX)
    one_sequence = [row for row in map_rows(answer, lines) if row["facet"] == facet_of(line)]
    rows = {"cells": one_sequence, **curve_rows(answer, line)}
    left = charts.with_rows(charts.winner_map("new tokens", "prefix tokens", answer.measured), rows)
    right = charts.with_rows(charts.curves("new tokens", answer.measured), rows)
    title = "H100, DeepSeek V3.2, 128 heads, fp8 KV, one sequence: the faster path, and by how much"
    return {
        "$schema": left.pop("$schema"),
        "config": charts.THEMES["light"],
        "background": "white",
        "datasets": left.pop("datasets"),
        "hconcat": [
            {**left, "title": title},
            {**_without(right), "title": f"prefix {PREFIX}", "width": 360, "height": 300},
        ],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "params": [{"name": "dark", "value": False}],
    }


def _without(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in spec.items() if name not in ("$schema", "datasets")}


if __name__ == "__main__":
    OUT.write_text(vl_convert.vegalite_to_svg(picture()), encoding="utf-8")
