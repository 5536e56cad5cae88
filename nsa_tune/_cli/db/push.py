"""The command `db push`: decision logs, failed checks and tables to a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.gpus import keys_of
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import Database
from nsa_tune._cli.shared.tables import chosen, named
from nsa_tune._errors import NsaTuneError, StoreError, UsageError
from nsa_tune.backend.types.counted import counted
from nsa_tune.db import places, reader
from nsa_tune.db.checks import newest_checks
from nsa_tune.fleet.push import findings_of, push_log, push_table
from nsa_tune.remote.address import address_in
from nsa_tune.remote.client import Client, hasty


@grouped
def push(
    service: Annotated[str, typer.Argument(metavar="URL", help="Address of a service.")],
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Decision log (NSA_TUNE_LOG) to send; may be given again."),
    ] = None,
    checks: Annotated[
        bool, typer.Option("--checks", help="Send what failed checks of the database found.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--tables", help="Send the tables of the database.")
    ] = False,
    *,
    tables: TableOptions,
    database: Database = None,
) -> None:
    """Send decision logs, failed checks or tables to a service. Sends only what an option names.

    What the service has already counts once. It needs a token of the role submit in NSA_TUNE_TOKEN.
    """
    address = address_in(service)
    if address is None:
        raise UsageError(f"{service!r} is no address of a service, like https://tables.example")
    if not (logs or checks or measured):
        raise UsageError("say what to send: --log FILE, --checks or --tables")
    if address.readable:
        say(f"{address.shown} is not encrypted: others can read the token and what is sent")
    client = hasty(address.server)
    for path in logs or ():
        say(f"{path}: {counted(push_log(client, path), 'new decision')}")
    if checks:
        _push_checks(client, tables, database)
    if measured:
        for table in chosen(tables, database or places.database_to_write()):
            say(f"{named(table.key)}: {counted(push_table(client, table), 'new measurement')}")


def _push_checks(service: Client, tables: TableOptions, database: Path | None) -> None:
    """Send what the newest check of each table found, where it failed.

    Raises:
        NsaTuneError: when the service refuses some of it; the rest is sent.
    """
    found = list(_findings(tables, database))
    refused = 0
    for finding in found:
        try:
            service.post("/v1/findings", finding)
        except StoreError as error:
            say(f"refused: {error}")
            refused += 1
    say(f"{counted(len(found) - refused, 'finding')} sent")
    if refused:
        raise NsaTuneError(f"refused {refused} of {counted(len(found), 'finding')}")


def _findings(tables: TableOptions, database: Path | None) -> Iterator[dict[str, object]]:
    if database is not None:
        reader.keys_in(database)  # who names a file means that file
    # A check is in the user's database, and its table may be anywhere.
    keys = {key.digest: key for key in keys_of(database)}
    wanted = tables.filter(database)
    for check in newest_checks(places.sources(database)):
        key = keys.get(check.digest)
        if key is not None and not check.holds and wanted.matches(key):
            yield from findings_of(check, key)
