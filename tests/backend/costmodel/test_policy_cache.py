"""Compiled policies beside their database: found by content, ignored when anything is off."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel import artifact as policy_cache
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.serving import Match
from nsa_tune.backend.types.records import Status
from nsa_tune.db.exchange import import_text
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import checked_measurements
from tests.backend.fake_point import FAKE, SETTING, Times, table_of
from tests.backend.machine import SLOW_DENSE, TIMES, opened, set_up, written

_SHORT = Batch.extend([0], [64])


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database with a table, on the machine of tests."""
    set_up(monkeypatch, tmp_path)
    return _add(tmp_path / "db" / "t.db", TIMES, "2025-01-01T00:00:00Z")


def _add(path: Path, times: Times, at: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    text = written(path.with_suffix(".tsv"), table_of(times, measured_at=at))
    with Store.open(path) as store:
        import_text(store, text)
    text.unlink()
    return path


def _kept(database: Path) -> list[Path]:
    return sorted(database.parent.glob("*.compiled"))


def _compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each policy that is compiled."""
    found: list[int] = []
    original = Policy.compile

    def compiling(*arguments: object) -> Policy:
        found.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "compile", compiling)
    return found


def _same(ours: Dispatcher, theirs: Dispatcher) -> None:
    random = Random(2)
    for _ in range(50):
        batch = FAKE.sample(SETTING, random)
        assert ours.plan(batch) == theirs.plan(batch)
        assert dict(ours.plan(batch).reasons) == dict(theirs.plan(batch).reasons)
    assert ours.table == theirs.table
    assert (ours.source, ours.match) == (theirs.source, theirs.match)


def test_what_was_kept_answers_the_same_without_compiling(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(database)
    assert len(_kept(database)) == 1
    compiled = _compiles(monkeypatch)

    again = opened(database)

    assert compiled == []
    _same(first, again)


def test_a_changed_database_is_read_again(database: Path) -> None:
    assert opened(database).plan(_SHORT).prefill_path == "mha"

    _add(database, SLOW_DENSE, "2025-02-01T00:00:00Z")

    assert opened(database).plan(_SHORT).prefill_path == "mla"
    assert opened(database).plan(_SHORT).prefill_path == "mla"


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _turned(data: bytes) -> bytes:
    return data[:-10] + bytes(255 - byte for byte in data[-10:])


def _emptied(data: bytes) -> bytes:
    del data
    return b""


def _of_another_version(data: bytes) -> bytes:
    return data.replace(b"nsa-tune-compiled 1", b"nsa-tune-compiled 9", 1)


@pytest.mark.parametrize("damage", [_cut, _turned, _emptied, _of_another_version])
def test_a_damaged_file_is_ignored_and_written_anew(
    database: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = opened(database)
    (file,) = _kept(database)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))

    _same(opened(database), first)
    assert file.read_bytes() == whole


def test_code_that_compiles_otherwise_does_not_use_it(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(database)
    compiled = _compiles(monkeypatch)
    monkeypatch.setattr(policy_cache, "_code", lambda: "other code")

    opened(database)

    assert compiled


def test_code_that_cannot_be_read_does_no_harm(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a zip archive, or while the package is exchanged."""

    def unreadable() -> str:
        raise NotADirectoryError("nsa_tune.zip")

    monkeypatch.setattr(policy_cache, "_code", unreadable)

    assert opened(database).match is not Match.RULE
    assert not _kept(database)


def test_a_directory_that_cannot_be_written_does_no_harm(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refused)

    assert opened(database).plan(_SHORT).prefill_path == "mha"
    assert _kept(database) == []


def test_nothing_is_written_beside_a_text_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_up(monkeypatch, tmp_path)
    path = written(tmp_path / "t" / "t.tsv", table_of(TIMES))

    opened(path)

    assert list(path.parent.iterdir()) == [path]


def test_measurements_are_read_back_as_they_were_written() -> None:
    plain = table_of(TIMES).measurements
    odd = [
        replace(plain[0], status=Status.FAILED, latency_us=None, low_us=None, high_us=None),
        replace(plain[1], reason="two\nlines\tand a tab", error=0.1 + 0.2, discarded=2),
        replace(plain[2], reason="\u2028 \ud800"),
    ]
    for rows in ((), plain, (*plain, *odd)):
        packed = policy_cache._packed(rows)
        assert "\n" not in packed
        assert checked_measurements(policy_cache._unpacked(packed)) == tuple(rows)
