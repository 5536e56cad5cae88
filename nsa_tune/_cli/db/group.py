"""The commands `db ...` put together."""

from __future__ import annotations

import typer

from nsa_tune._cli.db.merge import merge
from nsa_tune._cli.db.push import push
from nsa_tune._cli.db.tables import db_export, db_import, db_list

db = typer.Typer(
    help="List the tables of a database; export and import them as text.", no_args_is_help=True
)
for name, command in (
    ("list", db_list), ("export", db_export), ("import", db_import), ("merge", merge),
    ("push", push),
):  # fmt: skip
    db.command(name)(command)
