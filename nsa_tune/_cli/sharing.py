"""The commands `db merge`, `db publish`, `db pull` and `db push`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_tune._cli.shared import json_documents
from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import AsJson, Database, DatabaseToWrite
from nsa_tune._errors import NoTunedData, NsaTuneError, StoreError, StoreMissing, UsageError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import reader
from nsa_tune.fleet.pull.address import Address, address_in
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from nsa_tune.db.checks import Check
    from nsa_tune.db.merge import Merged
    from nsa_tune.db.store import Store
    from nsa_tune.fleet.registry.tables import Found

__all__ = ["merge", "publish", "pull", "push"]


def merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Databases and text tables; addresses too."),
    ],
    database: DatabaseToWrite = None,
    json: AsJson = False,
) -> None:
    """Add what other databases and text tables hold to a database.

    Of each cell the newest measurement counts, wherever it comes from: in whatever order and
    however often files are merged, the same comes out. The content hash of each table shows it.
    """
    from nsa_tune.db.store import Store

    keys: dict[Key, None] = {}
    with Store.open(database or reader.database_to_write()) as store:
        added = known = 0
        for file in files:
            merged = _merged(store, reader.local(file))
            address = address_in(file)
            name = file if address is None else address.shown
            say(f"{name}: {merged.added} measurements added, {merged.known} known")
            added, known = added + merged.added, known + merged.known
            keys |= dict.fromkeys(merged.keys)
        tables = list(_refitted(store, keys))
        path = store.path
    if json:
        document = json_documents.of_db_merge(str(path), added, known, tables)
        typer.echo(json_documents.as_text(document))
        return
    for table in tables:
        typer.echo(plain(_line(table)))


def _merged(store: Store, path: Path) -> Merged:
    """Merge what is in `path`, unless it would spoil what is there."""
    from nsa_tune.backend.dispatch.refit import check_fit
    from nsa_tune.db.merge import merge as merge_file

    text = path.suffix == ".tsv"
    for table in [reader.read_text(path)] if text else reader.read_database(path):
        check_fit(table)
    return merge_file(store, path)


def _refitted(store: Store, keys: Iterable[Key]) -> Iterator[Table]:
    """The tables of `keys`, whose models are fitted again."""
    from nsa_tune.backend.dispatch.refit import refit

    for key in keys:
        refit(store, key)
        yield store.table(key)


def _line(table: Table) -> str:
    from nsa_tune.db.text_table import content_of

    return f"{content_of(table)}  {_named(table.key)}: {len(table.measurements)} measurements"


def _named(key: Key) -> str:
    return f"{key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}, {key.protocol}"


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
    for table in _chosen(tables, database):
        done = publish_table(table, place, sign)
        signed = "" if sign is None else ", signed"
        state = "known already" if done.known else "published"
        say(f"{_named(table.key)}: {state}{signed}")
        typer.echo(done.manifest.content)


def _chosen(tables: TableOptions, database: Path | None) -> list[Table]:
    """The tables that the options name.

    Raises:
        NoTunedData: when there is none.
    """
    path = database or reader.default_database()
    known = [one for one in reader.read_database(path) if tables.filter.matches(one.key)]
    if not known:
        raise NoTunedData(f"{path} has no such table; `nsa-tune db list` shows what there is")
    return known


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
        raise NoTunedData(f"{place.shown} has no such table")
    with Store.open(database or reader.database_to_write()) as store:
        refused = sum(not _taken(store, one) for one in found)
    if refused:
        raise NsaTuneError(f"{refused} of {len(found)} tables were refused")


def _taken(store: Store, found: Found) -> bool:
    """Merge a table of a registry, unless it is refused; says which."""
    try:
        with found.opened() as path:
            merged = _merged(store, path)
    except StoreError as error:
        say(f"refused: {error}")
        return False
    for table in _refitted(store, dict.fromkeys(merged.keys)):
        signed = f", signed by {found.signer}" if found.signer else ""
        say(f"{_named(table.key)}: {merged.added} measurements added{signed}")
    typer.echo(found.name)
    return True


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
    """Send decision logs, failed checks or tables to a service. Nothing is sent unless named.

    What the service has already counts once. It needs a token of the role submit in NSA_TUNE_TOKEN.
    """
    from nsa_tune.fleet.push import push_log, push_table

    address = address_in(service)
    if address is None:
        raise UsageError(f"{service!r} is no address of a service, like https://tables.example")
    if not (logs or checks or measured):
        raise UsageError("say what to send: --log FILE, --checks or --tables")
    if address.readable:
        say(f"{address.shown} is not encrypted: others can read the token and what is sent")
    for path in logs or ():
        say(f"{path}: {push_log(address, path)} decisions were new")
    if checks:
        _push_checks(address, tables, database)
    if measured:
        for table in _chosen(tables, database or reader.database_to_write()):
            say(f"{_named(table.key)}: {push_table(address, table)} measurements were new")


def _push_checks(service: Address, tables: TableOptions, database: Path | None) -> None:
    """Send what the newest check of each table found, where it failed.

    Raises:
        NsaTuneError: when the service refuses some of it; the rest is sent.
    """
    from nsa_tune.fleet.push import push_finding

    found = list(_findings(tables, database))
    refused = 0
    for finding in found:
        try:
            push_finding(service, finding)
        except StoreError as error:
            say(f"refused: {error}")
            refused += 1
    say(f"{len(found) - refused} findings sent")
    if refused:
        raise NsaTuneError(f"{refused} of {len(found)} findings were refused")


def _findings(tables: TableOptions, database: Path | None) -> Iterator[dict[str, object]]:
    from nsa_tune.db.checks import read_checks
    from nsa_tune.db.text_table import read_key
    from nsa_tune.fleet.push import findings_of

    # A check is in the user's database, and its table may be anywhere.
    keys: dict[str, Key] = {}
    newest: dict[tuple[str, str, object], Check] = {}
    for path in reader.sources(database):
        if path.suffix == ".tsv":
            keys |= {key.digest: key for key in [read_key(path)]}
            continue
        try:
            keys |= {one.key.digest: one.key for one in reader.read_database(path)}
            newest |= {(one.digest, one.driver, one.libraries): one for one in read_checks(path)}
        except StoreMissing:
            continue
    for check in newest.values():
        key = keys.get(check.digest)
        if key is not None and not check.holds and tables.filter.matches(key):
            yield from findings_of(check, key)
