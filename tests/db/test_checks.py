"""Checks of a database that somebody else may have written."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import StoreError
from nsa_tune.db.checks import Anchor, Check, failed_checks, read_checks
from nsa_tune.db.store import Store

CHECK = Check(
    "ab", "580", (("torch", "2"),), "2026-11-20T12:00:00.000000+00:00", False, 0.1,
    (Anchor("prefill", "extend:0+1", {"mla/fa3": 10.0}, {"mla/fa3": 12.5}, "20 % slower"),),
)  # fmt: skip
ANCHOR = {"point": "prefill", "batch": "extend:0+1", "there_us": {}, "here_us": {}}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "some.db"
    with Store.open(path) as store:
        store.add_check(CHECK)
        store.add_check(CHECK)
    return path


def test_what_was_stored_is_read(database: Path) -> None:
    assert read_checks(database) == [CHECK, CHECK]
    assert failed_checks([database], CHECK.driver, CHECK.libraries) == {"ab": CHECK}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("digest", b"\x00"),
        ("driver", b"\x00"),
        ("checked_at", b"\x00"),
        ("drift", "fast"),
        ("libraries", "[]"),
        ("libraries", '{"torch": 2}'),
        ("libraries", '{"a":' * 10_000),
        ("anchors", "7"),
        ("anchors", "[7]"),
        ("anchors", json.dumps([{**ANCHOR, "batch": 7}])),
        ("anchors", json.dumps([{**ANCHOR, "problem": []}])),
        ("anchors", json.dumps([{**ANCHOR, "there_us": []}])),
        ("anchors", json.dumps([{**ANCHOR, "here_us": {"mla/fa3": "10"}}])),
        ("anchors", json.dumps([{**ANCHOR, "here_us": {"mla/fa3": 10**400}}])),
        ("anchors", json.dumps([{**ANCHOR, "more": 1}])),
    ],
)
def test_a_check_that_cannot_be_read_stops_nobody_who_opens_a_table(
    column: str, value: Any, database: Path
) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"UPDATE checks SET {column} = ? WHERE id = 2", [value])
        connection.commit()

    with pytest.raises(StoreError, match="is damaged"):
        read_checks(database)
    assert failed_checks([database], CHECK.driver, CHECK.libraries) == {}
