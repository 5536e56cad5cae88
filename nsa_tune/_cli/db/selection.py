"""Which tables of a database a command is for, and how it names them."""

from __future__ import annotations

from pathlib import Path

from nsa_tune._cli.shared.option_groups import TableOptions
from nsa_tune._errors import NoTunedData
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db import places, reader


def chosen(tables: TableOptions, database: Path | None, digest: str = "") -> list[Table]:
    """The tables that the options name, and whose key's digest begins with `digest`.

    Raises:
        NoTunedData: when there is none.
    """
    path = database or places.default_database()
    wanted = tables.filter
    known = [
        one
        for one in reader.read_database(path)
        if wanted.matches(one.key) and one.key.digest.startswith(digest)
    ]
    if not known:
        raise NoTunedData(f"{path} has no such table; `nsa-tune db list` shows what there is")
    return known


def named(key: Key) -> str:
    """A key in words."""
    return f"{key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}, {key.protocol}"
