"""The command `db merge`: the newest measurement of each cell, out of several databases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.options import AsJson, DatabaseToWrite
from nsa_tune._cli.shared.tables import named
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import places, reader
from nsa_tune.db.text_table import content_of
from nsa_tune.remote.address import address_in
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from nsa_tune.db.exchange import Merged
    from nsa_tune.db.store import Store


def merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Databases and text tables; addresses too."),
    ],
    database: DatabaseToWrite = None,
    json: AsJson = False,
) -> None:
    """Add what other databases and text tables hold to a database.

    Of each arm on each batch the newest measurement counts. So the order of the files does not
    matter, and a file may be merged again. Equal content hashes mean equal tables.
    """
    from nsa_tune.db.store import Store

    keys: dict[Key, None] = {}
    with Store.open(database or places.database_to_write()) as store:
        added = known = 0
        for file in files:
            merged = merge_file(store, places.local(file))
            address = address_in(file)
            name = file if address is None else address.shown
            say(f"{name}: {counted(merged.added, 'measurement')} added, {merged.known} known")
            added, known = added + merged.added, known + merged.known
            keys |= dict.fromkeys(merged.keys)
        tables = [store.table(key) for key in keys]
        path = store.path
    if json:
        print_document(_document(str(path), added, known, tables))
        return
    for table in tables:
        typer.echo(plain(_line(table)))


def merge_file(store: Store, path: Path) -> Merged:
    """Merge what is in `path`, unless it would spoil what is there."""
    from nsa_tune.backend.dispatch.fit_check import check_fit
    from nsa_tune.db.exchange import merge as merge_checked

    for table in reader.tables_in(path):
        check_fit(table)
    return merge_checked(store, path)


def _line(table: Table) -> str:
    rows = counted(len(table.measurements), "measurement")
    return f"{content_of(table)}  {named(table.key)}: {rows}"


def _document(database: str, added: int, known: int, tables: list[Table]) -> dict[str, Any]:
    """The document of `db merge`."""
    return {
        "schema": "nsa-tune/db-merge/1",
        "database": database,
        "added": added,
        "known": known,
        "tables": [
            {
                "digest": table.key.digest,
                "key": table.key.as_document(),
                "content": content_of(table),
                "measurements": len(table.measurements),
                "measured_at": table.measured_at,
            }
            for table in tables
        ],
    }
