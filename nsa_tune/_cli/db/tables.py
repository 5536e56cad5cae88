"""The commands `db list`, `db export` and `db import`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import AsJson, Database, DatabaseToWrite
from nsa_tune._cli.shared.tables import SHIPPED, chosen, document_of, known_tables, named
from nsa_tune._errors import UsageError
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Table
from nsa_tune.db import places
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.runs import Run, runs_of
from nsa_tune.db.store import Store
from nsa_tune.reports.formats.plain import plain

_MOST_RUNS = 1000
"""The newest runs of a database, which are listed."""
_SQLITE = b"SQLite format 3\0"
"""What every database begins with."""


def db_list(
    database: Database = None,
    with_runs: Annotated[
        bool,
        typer.Option("--runs", help="Also list the runs that measured each table, by number."),
    ] = False,
    json: AsJson = False,
) -> None:
    """List the tables of a database, and with --runs the runs that measured them.

    Without a database, the tables that ship are listed.

    `nsa-tune compare` takes a table by its digest, and a run by its number.
    """
    path, known = known_tables(database)
    runs = _runs_by_digest(path) if with_runs and known and path and path.suffix != ".tsv" else {}
    if json:
        print_document(_document(str(path or SHIPPED), known, runs if with_runs else None))
        return
    for table in known:
        measured = f"{counted(len(table.measurements), 'measurement')}, {table.measured_at}"
        typer.echo(plain(f"{table.key.digest}  {named(table.key)}: {measured}"))
        for run in runs.get(table.key.digest, ()):
            typer.echo(plain(f"    {_line(run)}"))
    if not known:
        say(f"{path} has no tables; measure with `nsa-tune run`")
    elif path is None:
        say(f"there is no database yet: these are {SHIPPED}")


def _runs_by_digest(path: Path) -> dict[str, list[Run]]:
    """The runs that measured something, by the digest of their table's key, the newest first."""
    runs: dict[str, list[Run]] = {}
    for run in runs_of(path, _MOST_RUNS):
        if run.measurements:
            runs.setdefault(run.digest, []).append(run)
    return runs


def _line(run: Run) -> str:
    imported = run.arguments.get("import")
    what = "running, or killed" if run.outcome is None else run.outcome
    what = what if imported is None else f"import of {imported}"
    failed = f", {run.failed} failed" if run.failed else ""
    rows = counted(run.measurements, "measurement")
    return f"run:{run.number}  started {run.started_at}, {what}: {rows}{failed}"


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
    write_text(_only(chosen(tables, database, key or "")), out)
    say(f"wrote {out}")


def db_import(
    file: Annotated[Path, typer.Argument(help="Text table that `db export` wrote.")],
    database: DatabaseToWrite = None,
) -> None:
    """Add a text table to a database. Measurements that are already there stay unchanged."""
    if _is_database(file):
        raise UsageError(f"{file} is a database: add it with `nsa-tune db merge {file}`")
    with Store.open(database or places.database_to_write()) as store:
        added = import_text(store, file)
        say(f"{counted(added, 'measurement')} added to {store.path}")


def _is_database(file: Path) -> bool:
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _only(tables: Sequence[Table]) -> Table:
    """The one table in `found`.

    Raises:
        UsageError: when there are several; the message has their digests.
    """
    if len(tables) > 1:
        digests = ", ".join(table.key.digest for table in tables)
        raise UsageError(f"{len(tables)} tables match; choose one with --key: {digests}")
    return tables[0]


def _document(
    database: str, tables: list[Table], runs: Mapping[str, Sequence[Run]] | None
) -> dict[str, Any]:
    """The document of `db list`; with `runs` each table has those that measured it."""
    return {
        "schema": "nsa-tune/db-list/1",
        "database": database,
        "tables": [
            {**document_of(table), **_runs_field(runs, table.key.digest)} for table in tables
        ],
    }


def _runs_field(runs: Mapping[str, Sequence[Run]] | None, digest: str) -> dict[str, Any]:
    if runs is None:
        return {}
    return {
        "runs": [
            {
                "run": run.number,
                "started_at": run.started_at,
                "ended_at": run.ended_at,
                "outcome": run.outcome,
                "measurements": run.measurements,
                "failed": run.failed,
                "arguments": run.arguments,
            }
            for run in runs.get(digest, ())
        ]
    }
