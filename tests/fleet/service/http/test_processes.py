"""The service and its workers as processes: killed in the middle, and pulled by many at once."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from nsa_tune.backend.hardware import detect
from nsa_tune.db.reader import read_database
from nsa_tune.fleet.service.auth.tokens import Role
from tests.fleet.service.made_up_tables import grown
from tests.fleet.service.served import Process, Served, tokens_of

ROOT = Path(__file__).parents[4]
CLIENTS, PUSHES = 200, 20


def _until(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until `happened` is true, as long as `process` lives."""
    end = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def _started(token: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", *words], text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NSA_TUNE_TOKEN": token},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_job_outlives_a_service_that_is_killed_and_is_done_once(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    tokens = tokens_of(database)
    worker = ["nsa_tune.cli", "worker", "--device", "cpu", "--no-wait", "--name", "w",
              "--db", str(tmp_path / "w.db"), "--patience", "60"]  # fmt: skip
    job = {"gpu": detect.cpu_name(), "model": "tiny", "kv_dtype": "fp8", "points": ["decode"],
           "budget_s": 6}  # fmt: skip
    with Process(database, "--lease", "6") as first:
        service = Served(first.port, tokens)
        refused = service.post("/v1/jobs", job, token="nst_wrong")
        assert refused.status == 401
        assert refused.document["error"].startswith("this token is not known here")
        assert service.post("/v1/jobs", job, role=Role.ADMIN).status == 201
        with _started(tokens[Role.SUBMIT], *worker, service.url) as working:
            _until(lambda: service.get("/v1/jobs").document["jobs"][0]["rows"], working)
            first.kill()
            before = len(read_database(database)[0].measurements)
            with Process(database, "--lease", "6", port=first.port) as second:
                _, said = working.communicate(timeout=120)
                assert working.returncode == 0, said
                (done,) = service.get("/v1/jobs").document["jobs"]
                assert second.stop()[0] == 0

    assert (done["state"], done["attempts"], done["worker"]) == ("done", 1, "w")
    assert said.count("job 1 is done") == 1
    (table,), (own,) = read_database(database), read_database(tmp_path / "w.db")
    assert {(one.batch, one.arm) for one in table.measurements} == {
        (one.batch, one.arm) for one in own.measurements
    }
    assert done["rows"] == len(table.measurements) >= before > 0
    with closing(sqlite3.connect(database)) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM measurements").fetchone()
    assert rows == len(table.measurements), "no row is there twice"


def test_many_pull_while_workers_push_and_nothing_is_lost(tmp_path: Path) -> None:
    database = tmp_path / "t.db"
    tokens = tokens_of(database)
    with Process(database) as process:
        service, begun = Served(process.port, tokens), Event()
        pushing = "tests.fleet.pushing", service.url
        with (
            _started(tokens[Role.SUBMIT], *pushing, "16", str(PUSHES)) as one,
            _started(tokens[Role.SUBMIT], *pushing, "64", str(PUSHES)) as other,
            ThreadPoolExecutor(CLIENTS) as clients,
        ):

            def pull(_: int) -> list[bytes]:
                """What one host gets until all is pushed, and then once more."""
                begun.wait()
                bodies, tag, ended = [], "", False
                while not ended:
                    ended = None not in (one.poll(), other.poll())
                    answer = service.get("/v1/database", If_None_Match=tag)
                    assert answer.status in (200, 304), answer.body
                    if answer.status == 200:
                        digest = hashlib.sha256(answer.body).hexdigest()
                        assert answer.headers["etag"] == f'"sha256-{digest}"'
                        bodies.append(answer.body)
                    tag = answer.headers["etag"]
                return bodies

            pulled = clients.map(pull, range(CLIENTS))
            _until(lambda: service.get("/v1/tables").document["tables"], one)
            begun.set()
            bodies = list(pulled)
            outs = [worker.communicate(timeout=120) for worker in (one, other)]
        assert [json.loads(out)["added"] for out, _ in outs] == [2 * PUSHES] * 2, outs
        assert process.stop()[0] == 0

    rows = {body: _rows(body, tmp_path) for body in {one for some in bodies for one in some}}
    assert len(bodies) == CLIENTS
    for some in bodies:
        counts = [rows[body] for body in some]
        assert counts == sorted(counts), "what one host has seen is not taken from it again"
        assert counts[-1] == 4 * PUSHES
    found = {table.key.heads: table.measurements for table in read_database(database)}
    assert found.keys() == {16, 64}
    for measurements in found.values():
        assert sorted(measurements, key=str) == sorted(grown(PUSHES).measurements, key=str)


def _rows(body: bytes, folder: Path) -> int:
    """How many rows a pulled database has, which must be whole."""
    path = folder / f"{hashlib.sha256(body).hexdigest()}.db"
    path.write_bytes(body)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return sum(len(table.measurements) for table in read_database(path))
