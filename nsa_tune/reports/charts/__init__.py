"""Charts as Vega-Lite specs in plain dicts: one pure function a chart.

A spec names its data sets and holds none; `with_rows` puts them in.
"""

from __future__ import annotations

from nsa_tune.reports.charts.chunks import chunk_rates
from nsa_tune.reports.charts.costs import default_costs
from nsa_tune.reports.charts.curves import curves
from nsa_tune.reports.charts.maps import winner_map
from nsa_tune.reports.charts.overview import overview
from nsa_tune.reports.charts.roofline import roofline
from nsa_tune.reports.charts.theme import THEMES, Rows, Spec, picture_theme, with_rows

__all__ = [
    "THEMES",
    "Rows",
    "Spec",
    "chunk_rates",
    "curves",
    "default_costs",
    "overview",
    "picture_theme",
    "roofline",
    "winner_map",
    "with_rows",
]
