r"""Loads `nsa-tune serve` on the loopback: what it loses and holds, and how long it takes.

    python -m benchmarks.service_load --tables 1000 --clients 2000 --slow 200 --workers 20 \
        --kills 60 --seconds 600

Tables fill the database. Then clients pull the tables of a key, some take the whole database
slowly, and workers push tables that grow, while the service is killed and started again, another
process locks its own database, and its files may not grow. It prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
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
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
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
_READ = ("healthz", "pull", "pull again")
"""A first pull, which takes the tables; another, which is told that they are the same."""
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

    def quantile(self, kind: str, share: float) -> float | None:
        """Seconds."""
        times = sorted(self.seconds.get(kind, ()))
        return round(times[int(share * (len(times) - 1))], 3) if times else None


async def _asked(port: int, path: str, headers: dict[str, str]) -> tuple[str, str]:
    """(status, tag) of an answer that was taken to its end."""
    lines = [f"GET {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        writer.write("\r\n".join((*lines, "", "")).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = re.search(r"(?i)content-length: (\d+)", head)
        left = int(length[1]) if length and head[9:12] == "200" else 0
        while left:
            block = await reader.read(min(left, 2**16))
            if not block:
                raise EOFError
            left -= len(block)
    tag = re.search(r"(?i)etag: (\S+)", head)
    return head[9:12], tag[1] if tag else ""


async def _ask(seen: Seen, kind: str, port: int, path: str, headers: dict[str, str]) -> str:
    """The tag of what came."""
    begun = time.monotonic()
    try:
        outcome, tag = await asyncio.wait_for(_asked(port, path, headers), _TIMEOUT_S)
    except (OSError, EOFError, TimeoutError) as error:
        outcome, tag = type(error).__name__, ""
    seen.add(kind if outcome != "304" else f"{kind} again", outcome, time.monotonic() - begun)
    return tag


async def _puller(asking: Asking, key: Key) -> None:
    """A host that asks for its tables, and every minute or so again."""
    fields = ("gpu", "model", "heads", "kv_layout")
    query = urlencode({name: getattr(key, name) for name in fields})
    headers = {"Authorization": f"Bearer {asking.token}", "Accept-Encoding": "gzip"}
    tag, port = "", asking.port
    while not asking.over.is_set():
        await asyncio.sleep(random.uniform(0, 2 * asking.pause_s))
        with_tag = headers | {"If-None-Match": tag}
        tag = await _ask(asking.seen, "pull", port, f"/v1/database?{query}", with_tag) or tag


async def _slow(asking: Asking) -> None:
    """Asks for the whole database and takes 4 KiB a second of it."""
    head = f"GET /v1/database HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {asking.token}\r\n\r\n"
    while not asking.over.is_set():
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", asking.port, limit=4096)
            with closing(writer):
                writer.write(head.encode())
                while not asking.over.is_set() and await reader.read(4096):
                    asking.seen.answers["slow block"] += 1
                    await asyncio.sleep(1)
        await asyncio.sleep(1)


async def _prober(asking: Asking) -> None:
    while not asking.over.is_set():
        await _ask(asking.seen, "healthz", asking.port, "/healthz", {})
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Asking:
    """Clients that only read, all of them in one process."""

    port: int
    token: str
    pause_s: float
    """Between two pulls of a client, on average."""
    over: Event
    seen: Seen = field(default_factory=Seen)

    async def all(self, keys: list[Key], slow: int) -> None:
        """One puller for each of `keys`, and `slow` that take the whole database."""
        await asyncio.gather(
            _prober(self),
            *(_puller(self, key) for key in keys),
            *(_slow(self) for _ in range(slow)),
        )


def _ask_all(
    told: Connection, over: Event, port: int, token: str, pause_s: float, keys: list[Key], slow: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**14)), hard))
    asking = Asking(port, token, pause_s, over)
    asyncio.run(asking.all(keys, slow))
    told.send((asking.seen.answers, asking.seen.seconds))


def _pusher(seen: Seen, number: int, port: int, token: str, template: Table, over: Event) -> None:
    """Pushes a table that grows by ten rows every ten seconds or so, as a worker does."""
    client = Client(f"http://127.0.0.1:{port}", token, patience_s=5)
    table = replace(template, key=replace(template.key, gpu=f"worker {number}"))
    rows = 0
    while not over.wait(random.uniform(5, 15)):
        rows = min(rows + 10, len(table.measurements))
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
             "seconds": 60, "pause": 30, "port": 0}  # fmt: skip
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
    template, seen = largest_shipped(), Seen()
    port, read, submit = serving.port, tokens[Role.READ], tokens[Role.SUBMIT]
    keys = [key_of(template.key, number % options.tables) for number in range(options.clients)]
    spawn = multiprocessing.get_context("spawn")
    told, tells = spawn.Pipe(duplex=False)
    over = spawn.Event()
    asking = spawn.Process(
        target=_ask_all, args=(tells, over, port, read, options.pause, keys, options.slow)
    )
    asking.start()
    with _running(options.workers, lambda i: _pusher(seen, i, port, submit, template, over)):
        _disturbed(serving, database, options)
        over.set()
    answers, seconds = told.recv()
    asking.join()
    seen.answers.update(answers)
    seen.seconds |= seconds
    serving.kill()
    lost, doubled = _compared(database, seen)
    return {
        "sizes": vars(options) | {"rows": rows, "database_mb": round(size / 1e6, 1)},
        "answers": dict(sorted(seen.answers.items())),
        "rows_acknowledged": sum(seen.acknowledged.values()), "rows_lost": lost,
        "rows_doubled": doubled, "peak_memory_mb": round(serving.peak_kb / 1000),
        "p50_s": {kind: seen.quantile(kind, 0.5) for kind in _READ},
        "p99_s": {kind: seen.quantile(kind, 0.99) for kind in _READ},
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
