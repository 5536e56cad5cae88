"""What was measured, made readable: crossovers, winners, and what the engine's default costs."""

from __future__ import annotations

from nsa_tune.reports.content.report import Report, build

__all__ = ["Report", "build"]
