"""Fetching a database: what is kept, and what is refused."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import pytest

from nsa_tune import StoreCorrupt, UsageError
from nsa_tune.remote import fetching
from nsa_tune.remote.address import Address
from nsa_tune.remote.fetching import Fetched
from tests.fleet.server import Kept, Server, serving

OLD, NEW = b"SQLite: old", b"SQLite: new"
PATH = "/v1/database"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked nobody yet."""
    monkeypatch.setattr(fetching, "_known", {})
    monkeypatch.setattr(fetching, "_said", set())
    # Whatever else the machine does: only tests that wait for it have a short one.
    monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", "60")


@pytest.fixture
def kept() -> Kept:
    return Kept({PATH: OLD})


@pytest.fixture
def server(kept: Kept) -> Iterator[Server]:
    with serving(kept) as server:
        yield server


def _check(path: Path) -> str:
    """When it was measured: what stands behind "@"."""
    content = path.read_bytes()
    if not content.startswith((b"SQLite", b"# format = ")):
        raise StoreCorrupt(f"{path} is not an SQLite database")
    return content.decode().partition("@")[2]


def _fetch(server: Server, cache: Path, end: str = "") -> Fetched:
    return fetching.fetched(Address.of(server.url + end), cache, _check, again=True)


def _content(found: Fetched) -> bytes:
    assert found.path is not None
    return found.path.read_bytes()


def test_a_database_is_fetched_once_and_kept(server: Server, kept: Kept, tmp_path: Path) -> None:
    first, second = _fetch(server, tmp_path), _fetch(server, tmp_path)

    assert _content(first) == _content(second) == OLD
    assert (first.is_new, second.is_new) == (True, False)
    assert "was fetched" in first.sentence
    assert "is unchanged" in second.sentence
    assert (kept.sent(200), kept.sent(304)) == (1, 1)


def test_a_process_asks_once_unless_it_is_told_to(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    for _ in range(3):
        fetching.fetched(Address.of(server.url), tmp_path, _check)

    assert len(kept.requests) == 1


def test_a_new_database_takes_the_place_of_the_old(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    old = _fetch(server, tmp_path)
    kept.files[PATH] = NEW
    new = _fetch(server, tmp_path)

    assert _content(new) == NEW
    assert _content(old) == OLD, "whoever has opened the old one goes on with it"


def test_the_last_copies_are_kept_and_older_ones_removed(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    found = []
    for i in range(11):
        kept.files[PATH] = b"SQLite: %d" % i
        found.append(_fetch(server, tmp_path).path)
        os.utime(found[-1] or tmp_path, (i, i))  # one after the other, whatever the clock shows

    assert {path for path in found if path and path.exists()} == {*found[3:]}


def test_an_answer_without_the_tables_of_the_copy_does_not_take_its_place(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    kept.files[PATH] = b"SQLite: measured @2026-11-20"
    _fetch(server, tmp_path)
    kept.files[PATH] = b"SQLite: rows deleted"

    found = _fetch(server, tmp_path)

    assert _content(found) == b"SQLite: measured @2026-11-20"
    assert "it no longer has the tables of the copy" in found.problem


def test_a_database_that_goes_back_is_used_and_said(
    server: Server, kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for day in (20, 21, 20):
        kept.files[PATH] = b"SQLite: @2026-11-%d" % day
        found = _fetch(server, tmp_path)

    assert _content(found) == b"SQLite: @2026-11-20"
    said = "has gone back: its newest table is of 2026-11-20, and was of 2026-11-21"
    assert caplog.text.count(said) == 1


def test_when_the_copy_is_damaged_the_one_before_is_used(kept: Kept, tmp_path: Path) -> None:
    with serving(kept) as server:
        old = _fetch(server, tmp_path)
        kept.files[PATH] = NEW
        new = _fetch(server, tmp_path)
    assert new.path is not None
    new.path.write_bytes(b"SQLite: flipped")

    found = _fetch(server, tmp_path)

    assert found.path == old.path
    assert "cannot be reached" in found.problem


def test_a_service_is_asked_for_one_table(server: Server, tmp_path: Path) -> None:
    fields = {"gpu": "NVIDIA H200", "heads": 16}
    for end in ("", "/a.db", f"#sha256={'0' * 64}"):
        fetching.fetched(Address.of(server.url + end).of_table(fields), tmp_path, _check)

    asked = [path for path, _, _ in server.kept.requests]
    assert asked == ["/v1/database?gpu=NVIDIA+H200&heads=16", "/a.db", "/v1/database"]


def test_text_tables_are_fetched_too(server: Server, kept: Kept, tmp_path: Path) -> None:
    kept.files["/h100.tsv"] = b"# format = nsa-tune-table 1\n"

    found = _fetch(server, tmp_path, "/h100.tsv")

    assert found.path is not None
    assert found.path.suffix == ".tsv"


def _broken(kept: Kept, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.files[PATH] = NEW
    match how:
        case "status":
            kept.status = 500
        case "page":
            kept.files[PATH] = b"<html>please log in"
        case "hash":
            kept.headers = {"X-Content-SHA256": "0" * 64}
        case "etag":
            kept.headers = {"ETag": f'"sha256-{"0" * 64}"'}
        case "no hash":
            kept.headers = {"X-Content-SHA256": "", "ETag": ""}
        case "token":
            kept.token = "right"
        case "cut":
            kept.cut = True
        case "drip":
            kept.drip_s = 0.2
            monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", "0.5")
        case "elsewhere":
            kept.redirects = {PATH: "ftp://127.0.0.1/a.db"}


BROKEN = {
    "status": "answers 500 Internal Server Error: the service is ill",
    "page": "sent what cannot be opened: it is not an SQLite database",
    "hash": f"sent something else than it should: the SHA-256 is {hashlib.sha256(NEW).hexdigest()}"
    f", not {'0' * 64}",
    "etag": "sent something else than it should",
    "no hash": "does not say the SHA-256 of what it sends",
    "token": "needs a token; set NSA_TUNE_TOKEN (401: this token is not known here)",
    "cut": "sent something else than it should",
    "drip": "did not answer within 0.5 s (NSA_TUNE_DB_TIMEOUT_S)",
    "elsewhere": "it redirects to 'ftp://127.0.0.1/a.db', which is not followed",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_is_refused_and_the_last_good_copy_used(
    how: str, server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _fetch(server, tmp_path)
    _broken(kept, how, monkeypatch)

    for _ in range(2):
        found = _fetch(server, tmp_path)

        assert _content(found) == OLD
        assert BROKEN[how] in found.problem
        assert "; the copy of 20" in found.sentence
    assert caplog.text.count(BROKEN[how]) == 1, "it is said once"
    assert not list(tmp_path.rglob(".draft*"))


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_is_refused_without_a_copy(
    how: str, server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(kept, how, monkeypatch)

    found = _fetch(server, tmp_path)

    assert found.path is None
    assert BROKEN[how] in found.sentence
    assert "there is no copy" in found.sentence


def test_a_server_that_is_gone(kept: Kept, tmp_path: Path) -> None:
    with serving(kept) as server:
        _fetch(server, tmp_path)

    found = _fetch(server, tmp_path)

    assert _content(found) == OLD
    assert "cannot be reached" in found.problem


def test_a_server_that_says_nothing_is_left_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", "0.3")
    with Server(Kept()) as silent:  # it takes connections, and nobody serves them
        begun = monotonic()
        found = _fetch(silent, tmp_path)

    assert "did not answer within 0.3 s" in found.problem
    assert monotonic() - begun < 60, "and not only when the connection ends by itself"


def test_what_speaks_no_http_is_refused(tmp_path: Path) -> None:
    import socket
    import threading

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"\x00\x01 I am no web server\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        address = Address.of(f"http://127.0.0.1:{listener.getsockname()[1]}")
        found = fetching.fetched(address, tmp_path, _check)
        thread.join()

    assert "broke off, or is no web server" in found.sentence


def test_the_right_token_is_let_in_and_a_wrong_one_is_named(
    server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.token = "right"
    monkeypatch.setenv("NSA_TUNE_TOKEN", "wrong")
    assert "knows no such token; set NSA_TUNE_TOKEN" in _fetch(server, tmp_path).problem

    monkeypatch.setenv("NSA_TUNE_TOKEN", "right")
    assert _content(_fetch(server, tmp_path)) == OLD


@pytest.mark.parametrize("token", ["two words", "a\r\nHost: b", "t\u00f6ken"])
def test_a_token_that_is_none_is_a_wrong_setting(
    token: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_TOKEN", token)

    with pytest.raises(UsageError, match="NSA_TUNE_TOKEN is no token") as caught:
        _fetch(server, tmp_path)
    assert token not in str(caught.value)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e9"])
def test_a_timeout_that_is_none_is_said_and_the_default_waited(
    text: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", text)

    assert _content(_fetch(server, tmp_path)) == OLD
    assert f"NSA_TUNE_DB_TIMEOUT_S is {text!r}, not seconds" in caplog.text


def test_a_redirection_is_followed_without_the_token(
    server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_TOKEN", "right")
    with serving(Kept({"/a.db": NEW})) as other:
        kept.redirects[PATH] = f"{other.url}/a.db"

        assert _content(_fetch(server, tmp_path)) == NEW

        assert server.kept.requests == [(PATH, 302, True)]
        assert other.kept.requests == [("/a.db", 200, False)]


def test_a_pinned_database_is_asked_for_until_it_is_here(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    pin = f"#sha256={hashlib.sha256(NEW).hexdigest()}"
    kept.headers = {"X-Content-SHA256": "", "ETag": ""}
    assert "sent something else" in _fetch(server, tmp_path, f"/{PATH[1:]}{pin}").problem
    kept.files[PATH] = NEW

    for _ in range(3):
        found = _fetch(server, tmp_path, f"/{PATH[1:]}{pin}")
        assert _content(found) == NEW
        assert found.fetched_at.startswith("20")

    assert kept.sent(200) == 2


def test_a_copy_that_was_damaged_is_fetched_anew(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    path = _fetch(server, tmp_path).path
    assert path is not None
    path.write_bytes(b"SQLite: flipped")

    assert _content(_fetch(server, tmp_path)) == OLD
    assert kept.sent(200) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": 3}', "[" * 10_000])
def test_a_state_that_nobody_can_read_counts_as_none(
    text: str, server: Server, tmp_path: Path
) -> None:
    _fetch(server, tmp_path)
    (state,) = tmp_path.rglob("state.json")
    state.write_text(text)

    assert _content(_fetch(server, tmp_path)) == OLD


def test_without_a_place_for_copies_it_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    found = _fetch(server, tmp_path / "file")

    assert found.path is None
    assert "cannot be kept" in found.sentence
    assert "set XDG_CACHE_HOME" in found.sentence


def test_an_open_connection_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", "0.2")

    fetching.fetched(Address.of("http://nobody.invalid"), tmp_path, _check)

    assert "http://nobody.invalid/v1/database is not encrypted: others can read" in caplog.text


def test_good_news_is_no_warning(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    _fetch(server, tmp_path)

    assert [one.levelno for one in caplog.records] == [logging.INFO]


def test_the_folder_is_the_users_alone(server: Server, tmp_path: Path) -> None:
    path = _fetch(server, tmp_path / "cache").path

    assert path is not None
    assert path.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_uid == os.getuid()


def test_a_copy_in_wal_mode_leaves_nothing_behind(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    source = tmp_path / "source.db"
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE a (b)")
    kept.files[PATH] = source.read_bytes()

    def look(path: Path) -> str:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("SELECT * FROM a").fetchall()
        return ""

    found = fetching.fetched(Address.of(server.url), tmp_path / "cache", look)

    assert found.path is not None
    assert {one.name for one in found.path.parent.iterdir()} == {
        found.path.name, "state.json", "lock",
    }  # fmt: skip
