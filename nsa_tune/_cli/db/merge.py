"""The command `db merge`: the newest measurement of each cell, out of several databases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.options import AsJson, DatabaseToWrite
from nsa_tune._cli.shared.tables import document_of, named
from nsa_tune.backend.dispatch.fit_check import check_fit
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key
from nsa_tune.db import exchange, places, reader
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import content_of
from nsa_tune.remote.address import address_in
from nsa_tune.reports.formats.plain import plain


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
        documents = [{**document_of(table), "content": content_of(table)} for table in tables]
        counts = {"database": str(path), "added": added, "known": known}
        print_document({"schema": "nsa-tune/db-merge/1", **counts, "tables": documents})
        return
    for table in tables:
        rows = counted(len(table.measurements), "measurement")
        typer.echo(plain(f"{content_of(table)}  {named(table.key)}: {rows}"))


def merge_file(store: Store, path: Path) -> exchange.Merged:
    """Merge what is in `path`, unless it would spoil what is there."""
    for table in reader.tables_in(path):
        check_fit(table)
    return exchange.merge(store, path)
