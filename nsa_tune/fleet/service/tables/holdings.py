"""What the database with the tables holds, without reading the tables."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from nsa_tune.backend.types.records import Key
from nsa_tune.db.connection import connect_read_only, store_errors

# A table in which nothing succeeded answers nothing: it is as if there were none.
_KEYS = """
    SELECT gpu, driver, libraries, model, heads, kv_layout, protocol FROM keys
    WHERE EXISTS (
        SELECT 1 FROM measurements JOIN runs ON runs.id = run_id
        WHERE key_id = keys.id AND status = 'ok'
    ) ORDER BY id
"""


class Held(NamedTuple):
    """What there is."""

    keys: tuple[Key, ...]
    """Of tables in which something succeeded, oldest first."""
    measurements: int


def held_in(path: Path) -> Held:
    """What the database `path` holds.

    Raises:
        StoreError: when it cannot be read.
    """
    with store_errors(path), closing(connect_read_only(path)) as connection:
        rows = connection.execute(_KEYS).fetchall()
        (count,) = connection.execute("SELECT count(*) FROM measurements").fetchone()
    keys = tuple(
        Key(gpu, driver, tuple(json.loads(libraries).items()), *rest)
        for gpu, driver, libraries, *rest in rows
    )
    return Held(keys, int(count))
