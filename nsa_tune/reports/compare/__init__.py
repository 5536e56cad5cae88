"""Two measurements of one setting against each other: what became faster, what moved."""

from __future__ import annotations

from nsa_tune.reports.compare.comparison import Comparison, compare
from nsa_tune.reports.compare.judging import Verdict
from nsa_tune.reports.compare.sides import pairs_of, side_of

__all__ = ["Comparison", "Verdict", "compare", "pairs_of", "side_of"]
