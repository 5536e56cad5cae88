"""Small tables of an H200, for tests of a service."""

from __future__ import annotations

from dataclasses import replace

from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.text_table import format_table
from tests.records import DEVICE, KEY, ok, table

H200 = replace(DEVICE, name="NVIDIA H200")
H200_KEY = replace(KEY, gpu=H200.name)
TARGET = {name: getattr(H200_KEY, name) for name in ("gpu", "model", "heads", "kv_layout")}
_ARMS = ("mha/fa3", "mla/flashmla_sparse")


def grown(batches: int, key: Key = H200_KEY, minute: int = 0) -> Table:
    """A table of so many batches; each larger one holds the smaller ones."""
    rows = [
        ok(f"extend:0+{16 * (1 + batch)}", arm, 100.0 + batch + 7 * place)
        for batch in range(batches)
        for place, arm in enumerate(_ARMS)
    ]
    at = f"2026-11-20T12:{minute:02}:00.000000+00:00"
    return replace(table(*rows, key=key, measured_at=at), device=H200)


def text_of(one: Table) -> bytes:
    """What a worker pushes."""
    return format_table(one).encode()
