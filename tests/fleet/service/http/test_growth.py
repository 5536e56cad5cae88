"""A service that grew: a thousand tables, clients that are slow, and what else would end it."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from benchmarks.service_load import fill, key_of, largest_shipped
from nsa_tune.backend.types.records import Key
from nsa_tune.db.reader import read_database
from nsa_tune.db.text_table import read_text
from nsa_tune.fleet.service.auth.tokens import Role
from nsa_tune.fleet.service.service import Busy, Service
from nsa_tune.fleet.service.state import state_path
from tests.fleet.service.made_up_tables import H200_KEY, TARGET, grown, text_of
from tests.fleet.service.served import Process, Served, served, tokens_of, until

pytestmark = pytest.mark.slow

TABLES, ROWS = 1000, 320
CLAIM = {"claim": "c" * 16, "worker": "w", "gpu": "GPU 3"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of a thousand tables, which tests may add to."""
    path = tmp_path_factory.mktemp("large") / "t.db"
    assert fill(path, TABLES, ROWS) == TABLES * ROWS
    return path


@pytest.fixture(scope="module")
def service(large: Path) -> Iterator[Served]:
    with served(large) as running:
        yield running


def _query(key: Key) -> str:
    return urlencode({name: getattr(key, name) for name in ("gpu", "model", "heads", "kv_layout")})


# --- a thousand tables


def test_a_thousand_tables_are_listed_and_a_worker_gets_jobs(service: Served) -> None:
    listed = service.get("/v1/tables")
    assert listed.status == 200
    assert len(listed.document["tables"]) == TABLES
    assert {table["rows"] for table in listed.document["tables"]} == {ROWS}
    assert service.post("/v1/jobs/claim", CLAIM).status == 200
    assert service.get("/metrics").status == 200
    assert service.get("/").body.count(b'href="report/') == TABLES


def test_the_text_of_one_of_a_thousand_tables_is_pulled(service: Served, tmp_path: Path) -> None:
    key = key_of(largest_shipped().key, 500)
    listed = service.get(f"/v1/tables?{_query(key)}").document["tables"]
    (url,) = [table["url"] for table in listed if table["driver"] == key.driver]
    text = service.get(url)
    assert text.status == 200
    (tmp_path / "table.tsv").write_bytes(text.body)
    assert read_text(tmp_path / "table.tsv").key == key


def test_a_host_pulls_its_own_tables_and_a_push_elsewhere_changes_nothing(
    service: Served, large: Path, tmp_path: Path
) -> None:
    key = key_of(largest_shipped().key, 500)
    mine = service.get(f"/v1/database?{_query(key)}")
    assert mine.status == 200
    (tmp_path / "mine.db").write_bytes(mine.body)
    tables = read_database(tmp_path / "mine.db")
    assert {(table.key.gpu, table.key.heads) for table in tables} == {(key.gpu, key.heads)}
    assert key in {table.key for table in tables}
    assert len(mine.body) < large.stat().st_size / 20
    packed = service.get(f"/v1/database?{_query(key)}", Accept_Encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(mine.body) / 3

    elsewhere = text_of(grown(2, replace(H200_KEY, gpu="elsewhere")))
    assert service.post("/v1/tables", elsewhere).document["added"] == 4

    tag = mine.headers["etag"]
    assert service.get(f"/v1/database?{_query(key)}", If_None_Match=tag).status == 304


def test_a_gpu_that_nobody_measured_gets_the_tables_of_the_others(
    service: Served, tmp_path: Path
) -> None:
    key = replace(key_of(largest_shipped().key, 500), gpu="GPU of next year")
    (tmp_path / "a.db").write_bytes(service.get(f"/v1/database?{_query(key)}").body)
    assert {table.key.gpu for table in read_database(tmp_path / "a.db")} == {
        f"GPU {number}" for number in range(10)
    }
    none = urlencode({**TARGET, "gpu": "x", "model": "tiny", "heads": 4})
    (tmp_path / "b.db").write_bytes(service.get(f"/v1/database?{none}").body)
    assert read_database(tmp_path / "b.db") == []


# --- slow clients


def _asking(stack: ExitStack, port: int, head: str) -> socket.socket:
    """A client that sends `head` and takes nothing."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(head.encode())
    return client


def test_slow_readers_hold_no_copies_in_memory(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    fill(database, 200, ROWS)
    size = database.stat().st_size
    tokens = tokens_of(database)
    head = (
        f"GET /v1/database HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tokens[Role.READ]}\r\n\r\n"
    )
    with Process(database) as process, ExitStack() as stack:
        service = Served(process.port, tokens)
        assert service.get("/v1/database").status == 200
        before = process.peak_bytes
        clients = [_asking(stack, process.port, head) for _ in range(60)]
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 200"
        assert service.get("/healthz", role=None).status == 200
        assert process.peak_bytes - before < 60 * size / 8


def test_stalled_uploads_are_few_and_not_in_memory(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    tokens = tokens_of(database)
    length = 2**24
    head = (
        f"POST /v1/tables HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tokens[Role.SUBMIT]}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    with Process(database) as process, ExitStack() as stack:
        service = Served(process.port, tokens)
        before = process.peak_bytes
        clients = [_asking(stack, process.port, head) for _ in range(16)]
        for client in clients:
            client.sendall(bytes(2**22))
        refused = service.post("/v1/tables", text_of(grown(1)))
        assert refused.status == 503
        assert refused.headers["retry-after"] == "5"
        # Others are not held up by one token.
        assert service.post("/v1/tables", text_of(grown(1)), role=Role.ADMIN).status == 200
        assert process.peak_bytes - before < 16 * 2**22


def test_two_tables_are_checked_at_once_and_sixteen_wait_at_most(tmp_path: Path) -> None:
    lock, gone = threading.Lock(), threading.Event()
    working: list[int] = []
    counts: list[int] = []

    def check() -> None:
        with lock:
            working.append(1)
            counts.append(len(working))
        gone.wait(30)
        with lock:
            working.pop()

    async def load(service: Service) -> int:
        tasks = [asyncio.create_task(service.check(check)) for _ in range(20)]
        await asyncio.sleep(0.1)
        gone.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(result, Busy) for result in results)

    with closing(Service(tmp_path / "t.db")) as service:
        assert asyncio.run(load(service)) == 4
    assert max(counts) == 2


def test_made_up_workers_leave_the_list_of_workers_small(tmp_path: Path) -> None:
    with served(tmp_path / "t.db") as service:
        libraries = {f"library {number}": "1" * 300 for number in range(40)}
        refused = service.post("/v1/jobs/claim", {**CLAIM, "libraries": libraries})
        assert refused.status == 400
        assert "at most 4096 characters" in refused.document["error"]
        for number in range(250):
            service.post("/v1/jobs/claim", {**CLAIM, "worker": f"pod-{number}"})
        assert len(service.get("/v1/workers").document["workers"]) == 200


def test_made_up_gpus_end_nobody_elses_counts_of_batches(tmp_path: Path) -> None:
    def log(*gpus: str) -> bytes:
        decision = {
            **TARGET, "schema": "nsa-tune/decision/1", "time": 1, "count": 1,
            "batch": "extend:0+16", "own": {}, "taken": {},
        }  # fmt: skip
        return b"".join(json.dumps({**decision, "gpu": gpu}).encode() + b"\n" for gpu in gpus)

    with served(tmp_path / "t.db") as service:
        for number in range(66):
            junk = log(*(f"junk {number} {place}" for place in range(16)))
            service.post("/v1/decisions", junk)
        counted = service.post("/v1/decisions", log(TARGET["gpu"]), role=Role.ADMIN)
        assert counted.document == {"decisions": 1, "batches": 1}


# --- locks, disks, clients that leave


def test_a_lock_on_the_services_own_database_holds_up_no_reader(tmp_path: Path) -> None:
    with served(tmp_path / "t.db") as service:
        service.post("/v1/jobs", TARGET, role=Role.ADMIN)
        own = sqlite3.connect(state_path(tmp_path / "t.db"), isolation_level=None)
        with closing(own):
            own.execute("BEGIN IMMEDIATE")
            for path in ("/v1/jobs", "/v1/workers", "/v1/tables", "/v1/database", "/queue", "/"):
                assert service.get(path).status == 200, path
            refused = service.post("/v1/jobs/claim", CLAIM)
            assert refused.status == 503
            assert "is locked by another process" in refused.document["error"]
            own.execute("ROLLBACK")
        assert service.post("/v1/jobs/claim", CLAIM).status == 200


@pytest.mark.parametrize(("file_bytes", "taken"), [(160 * 2**10, False), (2**19, True)])
def test_what_a_full_disk_refuses_is_not_stored_and_what_was_acknowledged_is(
    file_bytes: int, taken: bool, tmp_path: Path
) -> None:
    database = tmp_path / "t.db"
    tokens = tokens_of(database)
    acknowledged, answers = 0, []
    with Process(database, file_bytes=file_bytes) as process:
        service = Served(process.port, tokens)
        for batches in (40, 400, 2000):
            answer = service.post("/v1/tables", text_of(grown(batches)))
            answers.append(answer.status)
            if answer.status == 200:
                acknowledged += answer.document["added"]
        assert service.get("/healthz", role=None).status == 200
    assert (answers[0], answers[-1]) == (200 if taken else 503, 503)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM measurements").fetchone() == (acknowledged,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_clients_that_leave_in_mid_body_write_no_pages_into_the_log(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    tokens = tokens_of(database)
    with Process(database) as process:
        service = Served(process.port, tokens)
        for _ in range(5):
            with ExitStack() as stack:
                head = (
                    "POST /v1/jobs/claim HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
                    f"Authorization: Bearer {tokens[Role.SUBMIT]}\r\n\r\nhalf"
                )
                _asking(stack, process.port, head)
        until(lambda: b'status="400"' in service.get("/metrics").body)
        _, said = process.stop()
    assert "Traceback" not in said
