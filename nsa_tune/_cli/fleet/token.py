"""The commands `token add`, `token list` and `token revoke`: who may use a service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.options import AsJson, DatabaseToWrite
from nsa_tune._errors import UsageError
from nsa_tune.db import places
from nsa_tune.fleet.service.auth.tokens import Role, Tokens
from nsa_tune.fleet.service.state import State, state_path

token = typer.Typer(help="Who may use `nsa-tune serve`.", no_args_is_help=True)


@token.command("add")
def token_add(
    name: Annotated[str, typer.Argument(help="Name of the user or host that gets the token.")],
    role: Annotated[
        Role,
        typer.Option(
            "--role",
            help="read: pull and ask; submit: push and take jobs too; admin: approve jobs too.",
        ),
    ] = Role.READ,
    database: DatabaseToWrite = None,
) -> None:
    """Make a token and print it. Only its hash is stored: it cannot be printed again."""
    path = database or places.database_to_write()
    if database is not None and not database.parent.is_dir():
        raise UsageError(f"there is no directory {database.parent}")
    if not path.exists():
        say(f"there is no database {path} yet: `nsa-tune serve --db {path}` makes it")
    elif not path.is_file():
        raise UsageError(f"{path} is no database: give the one that `nsa-tune serve` serves")
    with _tokens(database, create=True) as tokens:
        typer.echo(tokens.add(name, role))
    say(f"the service of {path} accepts this token of {name} from now on")


@token.command("list")
def token_list(database: DatabaseToWrite = None, json: AsJson = False) -> None:
    """List the tokens: name, role, and when each was made."""
    with _tokens(database, create=False) as tokens:
        listed = tokens.all()
    if json:
        print_document({"schema": "nsa-tune/tokens/1", "tokens": list(map(asdict, listed))})
        return
    for token in listed:
        typer.echo(f"{token.name}  {token.role}  {token.created_at}")
    if not listed:
        say("there are no tokens; make one with `nsa-tune token add`")


@token.command("revoke")
def token_revoke(
    name: Annotated[str, typer.Argument(help="Name of the token.")],
    database: DatabaseToWrite = None,
) -> None:
    """Revoke a token. A running service refuses it at once."""
    with _tokens(database, create=False) as tokens:
        tokens.revoke(name)
    say(f"the service no longer accepts the token of {name}")


@contextmanager
def _tokens(database: Path | None, *, create: bool) -> Iterator[Tokens]:
    path = state_path(database or places.database_to_write())
    with State.open(path, create=create) as state:
        yield Tokens(state)
