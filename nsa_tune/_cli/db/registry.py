"""The commands `db publish` and `db pull`: tables into a registry, and out of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_tune._cli.db.merge import merge_file, refitted
from nsa_tune._cli.db.selection import chosen, named
from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import Database, DatabaseToWrite
from nsa_tune._errors import NoTunedData, NsaTuneError, StoreError, UsageError
from nsa_tune.backend.types.counted import counted
from nsa_tune.db import reader

if TYPE_CHECKING:
    from nsa_tune.db.store import Store
    from nsa_tune.fleet.registry.tables import Found


_RegistryArgument = Annotated[
    str,
    typer.Argument(
        metavar="REGISTRY", help="Folder, or a bucket that fsspec can open: s3://bucket/tables."
    ),
]


@grouped
def publish(
    registry: _RegistryArgument,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", help="SSH key that signs the manifests, as `ssh-keygen -Y sign`."),
    ] = None,
    *,
    tables: TableOptions,
    database: Database = None,
) -> None:
    """Put tables of a database into a registry, each with a manifest, for other hosts to pull.

    The manifest has the key, the versions, how much was measured, the regret on batches that were
    left out, and the hash of the content. What is there already stays as it is.
    """
    from nsa_tune.fleet.registry.places import registry_of
    from nsa_tune.fleet.registry.tables import publish as publish_table

    place = registry_of(registry)
    for table in chosen(tables, database):
        done = publish_table(table, place, sign)
        signed = "" if sign is None else ", signed"
        state = "known already" if done.known else "published"
        say(f"{named(table.key)}: {state}{signed}")
        typer.echo(done.manifest.content)


@grouped
def pull(
    registry: _RegistryArgument,
    require_signature: Annotated[
        bool,
        typer.Option("--require-signature", help="Refuse tables that no allowed signer signed."),
    ] = False,
    allowed_signers: Annotated[
        Path | None,
        typer.Option(
            "--allowed-signers",
            envvar="NSA_TUNE_ALLOWED_SIGNERS",
            help="File of allowed signers, as `ssh-keygen -Y verify` reads it.",
        ),
    ] = None,
    *,
    tables: TableOptions,
    database: DatabaseToWrite = None,
) -> None:
    """Merge tables of a registry into a database.

    Each is compared with its manifest. A table that is refused is named with the reason; the others
    are merged, and the exit code is 1.
    """
    from nsa_tune.db.store import Store
    from nsa_tune.fleet.registry.places import registry_of
    from nsa_tune.fleet.registry.tables import Trust, found_in

    if require_signature and allowed_signers is None:
        raise UsageError(
            "--require-signature needs a file of allowed signers: --allowed-signers FILE, or "
            "NSA_TUNE_ALLOWED_SIGNERS"
        )
    place = registry_of(registry)
    trust = Trust(allowed_signers, require_signature)
    found = list(found_in(place, tables.filter.matches, trust))
    if not found:
        raise NoTunedData(f"no table of {place.shown} matches the options")
    with Store.open(database or reader.database_to_write()) as store:
        refused = sum(not _taken(store, one) for one in found)
    if refused:
        raise NsaTuneError(f"refused {refused} of {counted(len(found), 'table')}")


def _taken(store: Store, found: Found) -> bool:
    """Merge a table of a registry, unless it is refused; says which."""
    try:
        with found.opened() as path:
            merged = merge_file(store, path)
    except StoreError as error:
        say(f"refused: {error}")
        return False
    for table in refitted(store, dict.fromkeys(merged.keys)):
        signed = f", signed by {found.signer}" if found.signer else ""
        say(f"{named(table.key)}: {counted(merged.added, 'measurement')} added{signed}")
    typer.echo(found.name)
    return True
