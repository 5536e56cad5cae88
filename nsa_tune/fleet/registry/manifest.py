"""A published table's manifest: what it is for, what is in it, how good it is, and its hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import nsa_tune
from nsa_tune._errors import StoreCorrupt, StoreNewer
from nsa_tune.autotune.search.left_out import left_out
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Table

SCHEMA = "nsa-tune/manifest/1"
MOST_BYTES = 2**18
_HEX = re.compile("[0-9a-f]+")
_CONTENT, _SHA256 = 32, 64
"""Digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What stands beside a published table."""

    content: str
    """Of the table's line "# content": its name in the registry."""
    sha256: str
    """Of the table's file, in hexadecimal."""
    size: int
    """Of the table's file, in bytes."""
    key: Key
    """GPU, driver, model and so on, and the versions of the libraries."""
    measured_at: str
    """ISO 8601, UTC."""
    nsa_tune: str
    """The version that published it."""
    rows: int
    counts: Mapping[str, Mapping[str, int]]
    """By decision point: batches, and measurements by their status."""
    held_out_regret: Mapping[str, Mapping[str, float]]
    """By question, the regret on batches that were left out of the fit: its mean, `most`, which is
    the upper end of the mean's 95 % interval, and on how many batches."""

    @classmethod
    def of(cls, table: Table, content: str, data: bytes) -> Manifest:
        """The manifest of `table`, whose file has `data`; takes some seconds."""
        setting = Setting.of(table)
        regret = left_out(points_for(setting.profile), setting, table.measurements)
        return cls(
            content, hashlib.sha256(data).hexdigest(), len(data), table.key, table.measured_at,
            nsa_tune.__version__, len(table.measurements), _counts(table),
            {
                name: {"mean": round(one.mean, 6), "most": round(one.most, 6),
                       "batches": one.batches}
                for name, one in sorted(regret.items())
            },
        )  # fmt: skip

    @classmethod
    def parse(cls, data: bytes, shown: str) -> Manifest:
        """The manifest in `data`, which `shown` names in messages.

        Raises:
            StoreCorrupt: when it is none.
            StoreNewer: when a newer nsa-tune wrote it.
        """
        try:
            found = _fields(json.loads(data))
            schema = found.pop("schema")
            if schema != SCHEMA:
                if str(schema).startswith("nsa-tune/manifest/"):
                    raise StoreNewer(f"{shown} is a {schema}, which this nsa-tune does not read")
                raise ValueError(f"it is a {schema!r}")
            found["key"] = _key(**_fields(found["key"]))
            manifest = cls(**found)
            manifest._check()
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise StoreCorrupt(f"{shown} is no manifest: {error}") from None
        return manifest

    def _check(self) -> None:
        for value, digits in ((self.content, _CONTENT), (self.sha256, _SHA256)):
            if type(value) is not str or len(value) != digits or not _HEX.fullmatch(value):
                raise ValueError(f"{value!r} is no hash")
        if type(self.size) is not int or type(self.rows) is not int:
            raise ValueError("its counts are no whole numbers")

    def as_bytes(self) -> bytes:
        """The manifest as JSON, the same for the same manifest."""
        document = {"schema": SCHEMA, **asdict(self)}
        document["key"] = self.key.as_document()
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    def why_not(self, table: Table, data: bytes) -> str:
        """Why `table`, whose file has `data`, is not the one of this manifest; "" where it is."""
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != self.sha256 or len(data) != self.size:
            return f"its SHA-256 is {sha256}, not {self.sha256}"
        if table.key != self.key:
            return "its key is another one than the manifest's"
        if (len(table.measurements), _counts(table)) != (self.rows, self.counts):
            return "it has other measurements than the manifest counts"
        return ""


def _counts(table: Table) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for point in sorted({row.point for row in table.measurements}):
        rows = [row for row in table.measurements if row.point == point]
        statuses = Counter(str(row.status) for row in rows)
        found[point] = {
            "batches": len({row.batch for row in rows}),
            **dict(sorted(statuses.items())),
        }
    return found


def _fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _key(libraries: object, **rest: Any) -> Key:
    key = Key(libraries=tuple(_fields(libraries).items()), **rest)
    texts = (key.gpu, key.driver, key.model, key.kv_layout, key.protocol)
    if not all(type(text) is str for text in texts) or type(key.heads) is not int:
        raise ValueError("a key with something else than text")
    return key
