"""A report as one HTML file that needs no network."""

from __future__ import annotations

from nsa_tune.reports.html.bundle import bundling, charts_javascript
from nsa_tune.reports.html.page import as_html

__all__ = ["as_html", "bundling", "charts_javascript"]
