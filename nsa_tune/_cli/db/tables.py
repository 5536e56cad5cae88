"""The commands `db list`, `db export` and `db import`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_tune._cli.db.selection import chosen, named
from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import AsJson, Database, DatabaseToWrite
from nsa_tune._errors import UsageError
from nsa_tune.backend.types.records import Table
from nsa_tune.db import reader
from nsa_tune.reports.formats.plain import plain

__all__ = ["db_export", "db_import", "db_list"]

_SQLITE = b"SQLite format 3\0"
"""What every database begins with."""


def db_list(database: Database = None, json: AsJson = False) -> None:
    """List the tables of a database."""
    path = database or reader.default_database()
    known = reader.read_database(path)
    if json:
        print_document(_document(str(path), known))
        return
    for one in known:
        measured = f"{len(one.measurements)} measurements, {one.measured_at}"
        typer.echo(plain(f"{one.key.digest}  {named(one.key)}: {measured}"))
    if not known:
        say(f"{path} has no tables; measure with `nsa-tune run`")


@grouped
def db_export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Text table to write.")],
    key: Annotated[
        str | None, typer.Option("--key", help="Digest of the table's key, as `db list` shows it.")
    ] = None,
    *,
    tables: TableOptions,
    database: Database = None,
) -> None:
    """Write one table of a database as a text file, to compare, commit or import."""
    from nsa_tune.backend.dispatch.refit import write_fitted

    write_fitted(_only(chosen(tables, database, key or "")), out)
    say(f"wrote {out}")


def db_import(
    file: Annotated[Path, typer.Argument(help="Text table that `db export` wrote.")],
    database: DatabaseToWrite = None,
) -> None:
    """Add a text table to a database. Measurements that are already there stay unchanged."""
    from nsa_tune.backend.dispatch.refit import refit
    from nsa_tune.db.exchange import import_text
    from nsa_tune.db.store import Store

    if _is_database(file):
        raise UsageError(f"{file} is a database: add it with `nsa-tune db merge {file}`")
    with Store.open(database or reader.database_to_write()) as store:
        added = import_text(store, file)
        refit(store, reader.read_text(file).key)
        say(f"{added} measurements added to {store.path}")


def _is_database(file: Path) -> bool:
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _only(found: Sequence[Table]) -> Table:
    """The one table in `found`.

    Raises:
        UsageError: when there are several; the message has their digests.
    """
    if len(found) > 1:
        digests = ", ".join(table.key.digest for table in found)
        raise UsageError(f"{len(found)} tables match; choose one with --key: {digests}")
    return found[0]


def _document(database: str, tables: list[Table]) -> dict[str, Any]:
    """The document of `db list`."""
    return {
        "schema": "nsa-tune/db-list/1",
        "database": database,
        "tables": [
            {
                "digest": table.key.digest,
                "key": table.key.as_document(),
                "measurements": len(table.measurements),
                "measured_at": table.measured_at,
            }
            for table in tables
        ],
    }
