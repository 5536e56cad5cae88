"""Reports as pandas frames, for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_tune._errors import UnknownName
from nsa_tune.reports.output.flat import FLAT

if TYPE_CHECKING:
    import pandas as pd

    from nsa_tune.reports.content.report import Report

__all__ = ["frame"]


def frame(report: Report, name: str) -> pd.DataFrame:
    """The flat table `name` of `report`, one of `reports.output.flat.FLAT`.

    Times are microseconds; costs are ratios to the best measured choice.

    Raises:
        UnknownName: when there is no such table.
    """
    # pandas takes longer to load than the rest of a report.
    import pandas as pd

    if name not in FLAT:
        raise UnknownName.of("table", name, list(FLAT))
    table = FLAT[name]
    return pd.DataFrame(list(table.rows(report)), columns=list(table.columns))
