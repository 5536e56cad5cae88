"""Commands over databases: what is in one, and tables out of it and into it as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli import answers
from nsa_tune._cli.console import say
from nsa_tune._cli.files import only_table
from nsa_tune._cli.options import AsJson, Database, Gpu, Heads, KvDtypeOption, Model
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import family_of
from nsa_tune.db import reader as tables
from nsa_tune.reports.content.select import Wish
from nsa_tune.reports.output.plain import plain

__all__ = ["db"]

db = typer.Typer(help="Look into databases, and move tables between them.", no_args_is_help=True)


@db.command("list")
def db_list(database: Database = None, json: AsJson = False) -> None:
    """List the tables of a database."""
    path = database or tables.default_database()
    known = tables.read_database(path)
    if json:
        typer.echo(answers.as_text(answers.listed(str(path), known)))
        return
    for one in known:
        key = one.key
        typer.echo(
            plain(
                f"{key.digest}  {key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}, "
                f"{key.protocol}: {len(one.measurements)} measurements, {one.measured_at}"
            )
        )
    if not known:
        say(f"{path} has no tables; measure with `nsa-tune run`")


@db.command("export")
def db_export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Text table to write.")],
    key: Annotated[
        str | None, typer.Option("--key", help="Digest of the table's key, as `db list` shows it.")
    ] = None,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
) -> None:
    """Write one table of a database as text that can be compared, committed and imported."""
    from nsa_tune.db.exchange import write_text

    layout = None if kv_dtype is None else str(layout_of(kv_dtype, family_of(model)))
    wish = Wish(gpu, model, heads, layout)
    path = database or tables.default_database()
    known = [one for one in tables.read_database(path) if wish.matches(one.key)]
    if key is not None:
        known = [one for one in known if one.key.digest.startswith(key)]
    write_text(only_table(known, path), out)
    say(f"wrote {out}")


@db.command("import")
def db_import(
    file: Annotated[Path, typer.Argument(help="Text table that `db export` wrote.")],
    database: Database = None,
) -> None:
    """Add a text table to a database; measurements that are there already stay as they are."""
    from nsa_tune.db.exchange import import_text
    from nsa_tune.db.store import Store

    with Store.open(database or tables.default_database()) as store:
        added = import_text(store, file)
        say(f"{added} measurements added to {store.path}")
