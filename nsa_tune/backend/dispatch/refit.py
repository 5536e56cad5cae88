"""Fit a table's models when it is measured or imported, so that an engine fits nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa_tune._errors import StoreCorrupt, UnknownName
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.costmodel.weights import fit_weights
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Status, Table, Weights
from nsa_tune.db.text_table import read_text

if TYPE_CHECKING:
    from nsa_tune.db.store import Store

_UNFIT = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""What fitting a table that somebody made up may come to."""


def weights_of(table: Table) -> Weights | None:
    """What is fitted to `table`; None where nothing succeeded, or for a model of another version.

    Raises:
        StoreCorrupt: when a row's batch cannot be read.
    """
    if not any(one.status is Status.OK for one in table.measurements):
        return None
    try:
        setting = Setting.of(table)
    except UnknownName:
        return None
    features = [Features(point, setting) for point in points_for(setting.profile)]
    return fit_weights(features, table.measurements)


def check_fit(table: Table) -> None:
    """Pass when a stranger's table can be fitted: else it would spoil the one that it is added to.

    Raises:
        StoreCorrupt: when not.
    """
    try:
        weights_of(table)
    except _UNFIT as error:
        raise StoreCorrupt(f"nothing can be fitted to {table.source}: {error!r}") from error


def write_fitted(table: Table, path: Path) -> None:
    """Write `table` to `path` as text, with what is fitted to it.

    Raises:
        StoreError: when the file cannot be written.
    """
    from nsa_tune.db.exchange import write_text

    write_text(table, path)
    # The text rounds, and the weights are those of the text.
    rounded = read_text(path)
    write_text(rounded, path, weights_of(rounded))


def refit(store: Store, key: Key) -> None:
    """Keep in `store` what is fitted to the table of `key`."""
    table = store.table(key)
    weights = weights_of(table)
    if weights is not None:
        store.set_weights(table, weights)
