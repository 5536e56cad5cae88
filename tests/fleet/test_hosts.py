"""Hosts that open a server's database: each is a process of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.autotune.health import doctor
from nsa_tune.autotune.health.doctor import State
from nsa_tune.db import places, reader
from nsa_tune.remote import fetching
from nsa_tune.remote.address import Address
from tests.fleet.server import Kept, Server, serving
from tests.reports.synthetic import H100
from tests.shell import GPU, Shell

ROOT = Path(__file__).parents[2]
_HOST = f"""
import json, logging, sys
logging.basicConfig(format="%(message)s", level=logging.INFO)
from nsa_tune import Batch, Dispatcher
d = Dispatcher.open(gpu={H100.name!r}, model="deepseek-v3.2", heads=16, kv_dtype="fp8")
plan = d.plan(Batch.extend([1920], [128])).prefill_path
print(json.dumps(dict(source=d.source, plan=plan, modules=sorted(sys.modules))))
"""


class Host(NamedTuple):
    """What a process on a host said."""

    source: str
    plan: str
    modules: frozenset[str]
    log: str


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked nobody yet."""
    monkeypatch.setattr(fetching, "_known", {})
    monkeypatch.setattr(fetching, "_said", set())
    monkeypatch.setenv("NSA_TUNE_DB_TIMEOUT_S", "60")  # whatever else the machine does


@pytest.fixture
def kept(database: Path) -> Kept:
    return Kept({"/v1/database": database.read_bytes()})


@pytest.fixture
def server(kept: Kept) -> Iterator[Server]:
    with serving(kept) as server:
        yield server


def _started(home: Path, **variables: str) -> subprocess.Popen[str]:
    own = {"HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", _HOST], env={**os.environ, **own}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _said(process: subprocess.Popen[str]) -> Host:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return Host(found["source"], found["plan"], frozenset(found["modules"]), err)


def _host(home: Path, **variables: str) -> Host:
    return _said(_started(home, **variables))


def test_a_second_host_opens_by_address_and_goes_on_when_the_server_is_gone(
    kept: Kept, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(kept) as server:
        url = server.url
        hosts = [_host(home, NSA_TUNE_DB=url) for home in (first, second)]
        again = _host(second, NSA_TUNE_DB=url)
    gone = _host(second, NSA_TUNE_DB=url)
    never = _host(tmp_path / "third", NSA_TUNE_DB=url)

    for host in (*hosts, again, gone):
        assert host.source.startswith(f"{url}/v1/database, fetched 20")
        assert host.plan == hosts[0].plan
    assert "was fetched" in hosts[1].log
    assert "is unchanged; the copy of 20" in again.log
    assert gone.log.count("cannot be reached") == 1
    assert "; the copy of 20" in gone.log
    assert (kept.sent(200), kept.sent(304)) == (2, 1)
    assert url not in never.source
    assert "cannot be reached" in never.log
    assert "there is no copy" in never.log


def test_a_wrong_hash_and_a_wrong_token_are_refused_and_the_engine_goes_on(
    server: Server, kept: Kept, tmp_path: Path
) -> None:
    kept.headers = {"X-Content-SHA256": "0" * 64}
    lied = _host(tmp_path, NSA_TUNE_DB=server.url)
    kept.headers, kept.token = {}, "right"
    stranger = _host(tmp_path, NSA_TUNE_DB=server.url, NSA_TUNE_TOKEN="tok-4711")
    friend = _host(tmp_path, NSA_TUNE_DB=server.url, NSA_TUNE_TOKEN="right")

    assert server.url not in lied.source + stranger.source
    assert lied.log.count("sent something else than it should") == 1
    assert stranger.log.count("knows no such token; set NSA_TUNE_TOKEN") == 1
    assert "4711" not in stranger.log
    assert friend.source.startswith(server.url)


def test_a_database_whose_table_cannot_be_read_does_not_replace_the_copy(
    server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("NSA_TUNE_DB", server.url)
    good = Dispatcher.open(gpu=H100.name, model="deepseek-v3.2", heads=16, kv_dtype="fp8").source
    bad = tmp_path / "bad.db"
    bad.write_bytes(kept.files["/v1/database"])
    with closing(sqlite3.connect(bad)) as connection:
        connection.execute("CREATE TABLE rows AS SELECT * FROM measurements")
        connection.execute("DROP TABLE measurements")
        connection.execute("CREATE TABLE measurements AS SELECT * FROM rows")
        connection.execute("UPDATE measurements SET batch = NULL")
        connection.commit()
        connection.execute("PRAGMA journal_mode = DELETE")
    kept.files["/v1/database"] = bad.read_bytes()

    again = Dispatcher.open(gpu=H100.name, model="deepseek-v3.2", heads=16, kv_dtype="fp8").source

    assert kept.sent(200) == 2
    assert again == good
    assert "sent what cannot be opened" in caplog.text


def test_ranks_that_open_at_once_share_one_copy(server: Server, kept: Kept, tmp_path: Path) -> None:
    ranks = [_said(one) for one in [_started(tmp_path, NSA_TUNE_DB=server.url) for _ in range(6)]]

    assert len({rank.source for rank in ranks}) == 1
    assert ranks[0].source.startswith(server.url)
    assert kept.sent(200) == 1
    assert len(list(tmp_path.rglob("fetched/*/*.db"))) == 1


def test_ranks_that_wait_take_the_answer_of_the_one_that_asked(
    server: Server, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from nsa_tune.remote.copies import Copies

    alone = Copies.alone
    cache, address = tmp_path / "cache", Address.of(server.url)

    @contextmanager
    def after_another(self: Copies, seconds: float) -> Iterator[bool]:
        monkeypatch.setattr(Copies, "alone", alone)
        fetching._fetched(address, cache, lambda path: "")  # another rank
        with alone(self, seconds) as held:
            yield held

    monkeypatch.setattr(Copies, "alone", after_another)
    found = fetching.fetched(address, cache, lambda path: "")

    assert found.path is not None
    assert found.problem == ""
    assert len(kept.requests) == 1


def test_no_plan_asks_a_server(server: Server, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", server.url)
    found = Dispatcher.open(gpu=H100.name, model="deepseek-v3.2", heads=16, kv_dtype="fp8")
    assert found.source.startswith(server.url)
    assert len(kept.requests) == 1

    for prefix in range(200):
        found.plan(Batch.extend([prefix], [128])).reasons["prefill_path"]
    found.captured(8)
    found.explain(Batch.extend([1], [1]))
    assert len(kept.requests) == 1

    assert found.reload() is None
    assert len(kept.requests) == 2


def test_an_address_may_be_given_to_open(server: Server) -> None:
    found = Dispatcher.open(server.url, H100.name, model="deepseek-v3.2", heads=16, kv_dtype="fp8")

    assert found.source.startswith(server.url)


def test_a_strict_opening_says_what_the_server_said(
    server: Server, kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nsa_tune import NoTunedData

    monkeypatch.setattr(places, "shipped", list)
    kept.token = "right"

    with pytest.raises(NoTunedData, match="needs a token; set NSA_TUNE_TOKEN"):
        Dispatcher.open(
            server.url, H100.name, model="deepseek-v3.2", heads=16, kv_dtype="fp8", strict=True
        )


def test_what_speaks_http_is_loaded_only_for_an_address(server: Server, tmp_path: Path) -> None:
    assert "urllib.request" not in _host(tmp_path).modules
    assert "urllib.request" in _host(tmp_path, NSA_TUNE_DB=server.url).modules


# --- commands


def test_commands_read_an_address(
    server: Server, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = shell("db", "list", "--db", server.url)
    monkeypatch.setenv("NSA_TUNE_DB", server.url)

    assert listed.code == 0
    assert len(listed.out.splitlines()) == 2
    assert shell("db", "list").out == listed.out
    assert shell("lookup", "extend:0+8", *GPU, "--heads", "16", "--strict").code == 0
    assert shell("report", "--heads", "16").code == 0


def test_commands_that_write_refuse_an_address(server: Server, shell: Shell) -> None:
    done = shell("db", "import", "some.tsv", "--db", server.url)

    assert done.code == 2
    assert "which is only read; give a file to write" in done.err


def test_with_an_address_the_users_database_is_written(
    server: Server, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    clean_environment: Path,
) -> None:  # fmt: skip
    text = tmp_path / "some.tsv"
    assert shell("db", "export", "--heads", "16", "--db", server.url, "-o", str(text)).code == 0
    monkeypatch.setenv("NSA_TUNE_DB", server.url)

    done = shell("db", "import", str(text))

    assert done.code == 0
    own = clean_environment / ".local/share/nsa-tune/nsa-tune.db"
    assert f"measurements added to {own}" in done.err
    assert len(reader.read_database(own)) == 1


def test_a_command_says_why_nothing_was_fetched(
    server: Server, kept: Kept, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.token = "right"
    monkeypatch.setenv("NSA_TUNE_DB", server.url)

    done = shell("db", "list")

    assert done.code == 1
    assert "needs a token" in done.err


def test_doctor_says_what_the_server_said(
    server: Server, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", server.url)
    found = {one.subject: one for one in doctor.databases()}
    assert found["server"].state is State.OK
    assert "was fetched: 2 tables, " in found["server"].text

    kept.status = 503
    monkeypatch.setattr(fetching, "_known", {})
    found = {one.subject: one for one in doctor.databases()}
    assert found["server"].state is State.WARN
    assert "answers 503" in found["server"].text
    assert "; the copy of 20" in found["server"].text
    assert found["database"].state is State.NOTE


def test_doctor_names_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", "https://me:secret@tables.example")

    found = {one.subject: one for one in doctor.databases()}

    assert found["database"].state is State.FAIL
    assert "put the token into NSA_TUNE_TOKEN" in found["database"].text
