"""Which tables a command is for, and how it names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.option_groups import TableOptions
from nsa_tune._errors import NoTunedData, StoreError, UsageError
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import places
from nsa_tune.db.reader import keys_in, tables_in
from nsa_tune.db.text_table import read_key, read_text

SHIPPED = "the tables that ship with nsa-tune"


def known_tables(database: Path | None) -> tuple[Path | None, list[Table]]:
    """A file and the tables in it: `database`, or the default one; where there is none yet, None
    and the tables that ship.

    Raises:
        StoreError: when the database cannot be read.
    """
    path = database or places.default_database()
    if database is None and not path.exists() and places.shipped():
        return None, list(map(read_text, places.shipped()))
    return path, tables_in(path)


def chosen(tables: TableOptions, database: Path | None, digest: str = "") -> list[Table]:
    """The tables that the options name, and whose key's digest begins with `digest`.

    Raises:
        NoTunedData: when there is none.
    """
    path, known = known_tables(database)
    wanted = tables.filter(database)
    matches = [
        table
        for table in known
        if wanted.matches(table.key) and table.key.digest.startswith(digest)
    ]
    if not matches:
        place = f"there is no such table in {path or SHIPPED}"
        raise NoTunedData(f"{place}; `nsa-tune db list` shows what there is")
    return matches


def ask_for_choice(tables: TableOptions) -> None:
    """List the tables that ship, each as the command that reports it, where they are all there is
    and no option chooses any.

    Raises:
        UsageError: after the list.
    """
    ships = places.shipped()
    if tables.filter().asked() or any(map(_has_tables, set(places.sources(None)) - {*ships})):
        return
    for key in map(read_key, ships):
        kv_dtype = "bf16" if key.kv_layout == "bf16" else "fp8"
        options = f"--model {key.model} --heads {key.heads} --kv-dtype {kv_dtype}"
        say(f'nsa-tune report --gpu "{key.gpu}" {options}')
    if ships:
        raise UsageError(
            f"nothing is measured here, and {counted(len(ships), 'table')} ship: the lines above "
            "show each. --out report.html makes a page; which flags to set, and "
            'what they give, says `nsa-tune advise --gpu H200 --flags "--tp 8"`'
        )


def _has_tables(path: Path) -> bool:
    try:
        return bool(keys_in(path))
    except StoreError:
        return False


def document_of(table: Table) -> dict[str, Any]:
    """A table without its rows, as JSON."""
    return {
        "digest": table.key.digest,
        "key": table.key.as_document(),
        "measurements": len(table.measurements),
        "measured_at": table.measured_at,
    }


def named(key: Key) -> str:
    """A key in words."""
    return f"{key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}, {key.protocol}"
