"""Loads `nsa-tune serve` on the loopback: what it loses and holds, and how long it takes.

    python -m benchmarks.service_load --tables 1000 --clients 400 --seconds 60

Tables fill the database. Then clients pull the tables of a key, some take the whole database
slowly, and workers push tables that grow, while the service is killed and started again, another
process locks its own database, and its files may not grow. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.places import shipped
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table, read_text
from nsa_tune.fleet.service.auth.tokens import Role, Tokens
from nsa_tune.fleet.service.state import State, state_path
from nsa_tune.remote.client import Client, Refused

_ROOT = Path(__file__).parents[1]
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_ROWS = (
    "point, batch, arm, status, latency_us, low_us, high_us, samples, error, reason, measured_at, "
    "discarded, pass_us"
)
_TIMEOUT_S = 70.0
_FULL_BYTES = 2**18
"""Up to which files may grow while the disk counts as full: no more fits into a log then."""


# --- the database


def largest_shipped() -> Table:
    """The shipped table of V3.2 with the most rows."""
    tables = [read_text(path) for path in shipped()]
    return max(
        (table for table in tables if table.key.model == "deepseek-v3.2"),
        key=lambda table: len(table.measurements),
    )


def key_of(template: Key, number: int) -> Key:
    """Of ten GPUs, eight head counts, and as many drivers as are needed."""
    gpu, rest = f"GPU {number % 10}", number // 10
    heads, driver = _HEADS[rest % 8], f"580.{rest // 8}"
    return replace(template, gpu=gpu, heads=heads, driver=driver)


def fill(database: Path, tables: int, rows: int) -> int:
    """Make `database` with so many tables of up to so many rows; how many rows in all."""
    template = largest_shipped()
    with Store.open(database) as store:
        run = store.begin_run(key_of(template.key, 0), template.device, {})
        store.add(run, template.measurements[:rows])
        store.end_run(run, "done")
    with closing(sqlite3.connect(database)) as connection, connection:
        for number in range(1, tables):
            _copy(connection, key_of(template.key, number))
        (count,) = connection.execute("SELECT count(*) FROM measurements").fetchone()
    return int(count)


def _copy(connection: sqlite3.Connection, key: Key) -> None:
    words = (key.digest, key.gpu, key.driver, json.dumps(dict(key.libraries)), key.model, key.heads,
             key.kv_layout, key.protocol)  # fmt: skip
    names = "digest, gpu, driver, libraries, model, heads, kv_layout, protocol"
    number = connection.execute(
        f"INSERT INTO keys ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", words
    ).lastrowid
    run = connection.execute(
        "INSERT INTO runs (key_id, device_id, arguments, started_at, ended_at, outcome) "
        "SELECT ?, device_id, arguments, started_at, ended_at, outcome FROM runs WHERE id = 1",
        [number],
    ).lastrowid
    connection.execute(
        f"INSERT INTO measurements (run_id, {_ROWS}) "
        f"SELECT ?, {_ROWS} FROM measurements WHERE run_id = 1",
        [run],
    )


# --- the service


class Serving:
    """A service that is killed and comes back at the same port."""

    def __init__(self, database: Path, port: int) -> None:
        self._database = database
        self.port = port
        self.peak_kb = 0
        self._log = database.with_suffix(".log").open("w")
        self.start()

    def start(self, file_bytes: int = 0) -> None:
        """Start it; with `file_bytes` its files may not grow beyond that, as on a full disk."""

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        self._process = subprocess.Popen(
            [sys.executable, "-m", "nsa_tune.cli", "serve", "--db", str(self._database),
             "--port", str(self.port)],
            cwd=_ROOT, stderr=self._log, preexec_fn=limited if file_bytes else None,
        )  # fmt: skip
        while not self._answers():
            if self._process.poll() is not None:
                raise SystemExit(Path(self._log.name).read_text())
            time.sleep(0.1)

    def _answers(self) -> bool:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", self.port), 1)):
            return True
        return False

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._look()
        self._process.kill()
        self._process.wait()

    def _look(self) -> None:
        with suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            peak = re.search(r"VmHWM:\s+(\d+)", status)
            self.peak_kb = max(self.peak_kb, int(peak[1]) if peak else 0)


# --- who asks


@dataclass(slots=True)
class Seen:
    """What all clients and workers saw."""

    answers: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    acknowledged: Counter[int] = field(default_factory=Counter)
    """By worker, the rows that the service said it has added."""
    sent: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: str, seconds: float) -> None:
        """Note an answer."""
        with self.lock:
            self.answers[f"{kind} {outcome}"] += 1
            if outcome in ("200", "304"):
                self.seconds.setdefault(kind, []).append(seconds)

    def p99(self, kind: str) -> float | None:
        """Seconds."""
        times = sorted(self.seconds.get(kind, ()))
        return round(times[int(0.99 * (len(times) - 1))], 3) if times else None


def _ask(seen: Seen, kind: str, port: int, path: str, headers: dict[str, str]) -> str:
    """The tag of what came."""
    begun = time.monotonic()
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            outcome, tag = str(answer.status), answer.getheader("etag", "")
    except (OSError, HTTPException) as error:
        outcome, tag = type(error).__name__, ""
    seen.add(kind, outcome, time.monotonic() - begun)
    return tag


def _puller(seen: Seen, port: int, token: str, key: Key, over: threading.Event) -> None:
    fields = ("gpu", "model", "heads", "kv_layout")
    query = urlencode({name: getattr(key, name) for name in fields})
    path, tag = f"/v1/database?{query}", ""
    while not over.wait(random.uniform(0, 10)):
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"}
        tag = _ask(seen, "pull", port, path, headers | {"If-None-Match": tag}) or tag


def _slow(seen: Seen, port: int, token: str, over: threading.Event) -> None:
    """Asks for the whole database and takes 4 KiB a second of it."""
    request = f"GET /v1/database HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
    while not over.is_set():
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 5)) as taken:
            taken.sendall(request.encode())
            while not over.wait(1) and taken.recv(4096):
                seen.answers["slow block"] += 1
        over.wait(1)


def _prober(seen: Seen, port: int, over: threading.Event) -> None:
    while not over.wait(0.2):
        _ask(seen, "healthz", port, "/healthz", {})


def _pusher(
    seen: Seen, number: int, port: int, token: str, template: Table, over: threading.Event
) -> None:
    """Pushes a table that grows by ten rows every ten seconds or so, as a worker does."""
    client = Client(f"http://127.0.0.1:{port}", token, patience_s=5)
    table = replace(template, key=replace(template.key, gpu=f"worker {number}"))
    rows = 0
    while not over.wait(random.uniform(5, 15)) and rows < len(table.measurements):
        rows += 10
        body = format_table(replace(table, measurements=table.measurements[:rows]))
        seen.sent[number] = rows
        try:
            answer = client.post("/v1/tables", body.encode())
        except Refused as error:
            seen.add("push", str(error.status), 0.0)
        else:
            seen.add("push", "200", 0.0)
            # What was stored when an answer was lost is "known" the next time.
            seen.acknowledged[number] = answer["added"] + answer["known"]


@contextmanager
def _running(count: int, act: Callable[[int], None]) -> Iterator[None]:
    threading.stack_size(2**18)
    threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(_TIMEOUT_S)


# --- the whole


def main() -> None:
    """Load a service and print what came of it."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="nsa-tune-load-") as folder:
        print(json.dumps(_loaded(options, Path(folder)), indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = {"tables": 1000, "rows": 2500, "clients": 200, "slow": 50, "workers": 8, "kills": 3,
             "seconds": 60, "port": 0}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _loaded(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    database = folder / "tables.db"
    rows = fill(database, options.tables, options.rows)
    size = database.stat().st_size
    with State.open(state_path(database)) as state:
        tokens = {role: Tokens(state).add(str(role), role) for role in Role}
    serving = Serving(database, options.port or _free_port())
    template, over, seen = largest_shipped(), threading.Event(), Seen()
    port, read, submit = serving.port, tokens[Role.READ], tokens[Role.SUBMIT]
    keys = [key_of(template.key, number) for number in range(options.tables)]
    with (
        _running(1, lambda _: _prober(seen, port, over)),
        _running(options.clients, lambda i: _puller(seen, port, read, keys[i % len(keys)], over)),
        _running(options.slow, lambda _: _slow(seen, port, read, over)),
        _running(options.workers, lambda i: _pusher(seen, i, port, submit, template, over)),
    ):
        _disturbed(serving, database, options)
        over.set()
    serving.kill()
    lost, doubled = _compared(database, seen)
    return {
        "sizes": vars(options) | {"rows": rows, "database_mb": round(size / 1e6, 1)},
        "answers": dict(sorted(seen.answers.items())),
        "rows_acknowledged": sum(seen.acknowledged.values()), "rows_lost": lost,
        "rows_doubled": doubled, "peak_memory_mb": round(serving.peak_kb / 1000),
        "p99_s": {kind: seen.p99(kind) for kind in ("healthz", "pull")},
    }  # fmt: skip


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def _disturbed(serving: Serving, database: Path, options: argparse.Namespace) -> None:
    """Kill the service, lock its own database, and let its files grow no more, one by one."""
    pause = options.seconds / (options.kills + 3)
    for _ in range(options.kills):
        time.sleep(pause)
        serving.kill()
        serving.start()
    time.sleep(pause)
    with closing(sqlite3.connect(state_path(database), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(min(pause, 10))
        other.execute("ROLLBACK")
    serving.kill()
    serving.start(_FULL_BYTES)
    time.sleep(pause)
    serving.kill()
    serving.start()
    time.sleep(pause)


def _compared(database: Path, seen: Seen) -> tuple[int, int]:
    """(rows that were acknowledged and are not there, rows that are there twice)."""
    query = (
        "SELECT count(*), count(DISTINCT point || ' ' || batch || ' ' || arm) FROM measurements "
        "JOIN runs ON runs.id = run_id JOIN keys ON keys.id = key_id WHERE gpu = ?"
    )
    lost = doubled = 0
    with closing(sqlite3.connect(database)) as connection:
        ok = connection.execute("PRAGMA integrity_check").fetchone()
        if ok != ("ok",):
            raise SystemExit(f"the database is damaged: {ok}")
        for number, acknowledged in seen.acknowledged.items():
            stored, distinct = connection.execute(query, [f"worker {number}"]).fetchone()
            lost += max(acknowledged - distinct, 0)
            doubled += stored - distinct
    return lost, doubled


if __name__ == "__main__":
    main()
