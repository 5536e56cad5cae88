"""The overview of one question: its winner map beside the curves of one line."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tune.reports.charts.theme import SCHEMA, Chart, Rows, Spec


def overview(title: str, subtitle: str, panels: Mapping[str, Chart]) -> Spec:
    """`panels`, by their captions, side by side under `title`."""
    parts: list[Spec] = []
    datasets: dict[str, Rows] = {}
    params: list[Spec] = []
    for caption, chart in panels.items():
        drawn = chart.complete
        datasets.update(drawn.pop("datasets"))
        params += drawn.pop("params", ())
        drawn.pop("$schema")
        if drawn.get("width") == "container":
            drawn["width"] = 420
        drawn["title"] = {"text": caption, "fontSize": 12, "fontWeight": 500, "offset": 10}
        parts.append(drawn)
    return {
        "$schema": SCHEMA,
        "params": params,
        "title": {"text": title, "subtitle": subtitle, "fontSize": 17, "subtitleFontSize": 13,
                  "offset": 14},
        "hconcat": parts,
        "spacing": 40,
        "datasets": datasets,
        # Each panel has its own scales; the first one's legend names the colours of both.
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }  # fmt: skip
