"""Whether models can be fitted to a table that a stranger made."""

from __future__ import annotations

from nsa_tune._errors import StoreCorrupt, UnknownName
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Table

UNFIT = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip
"""What fitting numbers that no machine measures may come to."""


def check_fit(table: Table) -> None:
    """Pass when models can be fitted to `table`, or its model is one of another version.

    Raises:
        StoreCorrupt: when not: added to another table, it would spoil that one.
    """
    try:
        setting = Setting.of(table)
    except UnknownName:
        return
    try:
        for point in points_for(setting.profile):
            Policy.fit(point, setting, table.measurements)
    except UNFIT as error:
        raise StoreCorrupt(f"nothing can be fitted to {table.source}: {error!r}") from error
