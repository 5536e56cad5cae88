"""Everything that reads what strangers made, fed with what strangers might make.

    python -m tests.fuzz [--seconds 600] [--seed 1] [--target text] [--case 17]

Each case takes something good, changes it at random, and hands it to the code that reads it. The
code may use it, or refuse it with an NsaTuneError. Any other exception is a finding, and so is a
case that takes 10 s of CPU or 4 GiB of memory. A finding is printed with the words that repeat it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import resource
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic
from types import FrameType
from typing import Any, TypeAlias

from nsa_tune import Batch, Dispatcher
from nsa_tune._cli.db.merge import merge_file
from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.workload import weighted_batches
from nsa_tune.backend.types.records import Table
from nsa_tune.db.checks import Check, read_checks
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.history import read_histories
from nsa_tune.db.places import shipped
from nsa_tune.db.reader import keys_in, newest_in, read_database
from nsa_tune.db.runs import newest_of, run_table, runs_of, state_of
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import read_text
from nsa_tune.engines.decision_log import DecisionLog, read_decisions
from nsa_tune.fleet.service.documents import parsed
from nsa_tune.fleet.service.jobs.demand import Demand
from nsa_tune.fleet.service.jobs.queue import Jobs
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.jobs.weights import BatchWeights
from nsa_tune.fleet.service.state import State
from nsa_tune.fleet.service.tables.bodies import of_keys
from nsa_tune.fleet.service.tables.index import Held, Index
from nsa_tune.fleet.service.tables.uploads import checked, merge
from nsa_tune.remote.address import Address
from nsa_tune.remote.fetching import fetched
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.formats.json_document import as_json
from tests.db.loose import COLUMNS, loosen
from tests.reports.dashboard.served import served

Case: TypeAlias = Callable[[Random, Path], bool]
"""Runs one case in a folder; True when what was read was used."""

_READERS: tuple[Callable[[Path], object], ...] = (
    read_database, read_histories, read_checks, keys_in, newest_in, state_of, runs_of, newest_of,
    lambda path: run_table(path, 1), lambda path: _held(path).keys,
)  # fmt: skip
_QUICK = frozenset({"trace", "log", "http"})
_CASE_S = 10
_MEMORY = 4 * 2**30
_HOSTILE = (
    "", "-", "0", "-1", "nan", "inf", "-inf", "1e400", "1e308", "1e-320", "1e-308", "1e9", "1e-3",
    "9" * 30, "9" * 5000, "1e", "0x10", "1_000", "\\ud800", "\\u0000", "\\", "\t", "\n", "\r", "#",
    "=1+1", "extend:0+1", "extend:0+1x262144", "extend:0+1x999999", "extend:2147483647+1",
    "extend:0+0", "decode:n1:1", "target_verify:n4:8x64", "decode:n999999999:999999999",
    "copy:1073741824", "mha/fa3", "mla/flashmla_kv", "ok", "failed", "wrong", "prefill", "decode",
    "sm100", "cpu", "{}", "[]", "null", "NaN", "Infinity", "true", '"', "[" * 3000, "é",
    "\U0001f600", "<script>", "../../etc/passwd", "%s", "{q_tokens}",
)  # fmt: skip
_BATCHES = [
    Batch.extend([0], [64]), Batch.extend([512, 1920], [64, 128]), Batch.extend([30720], [2048]),
    Batch.decode([8192] * 16), Batch.verify([4096] * 8, 2), Batch.extend([2**20], [2**20]),
]  # fmt: skip


def _held(path: Path) -> Held:
    with closing(Index(path)) as index:
        return index.held()


class _TooLong(Exception):
    """A case took too much time."""


class Finding(Exception):
    """What a case should not have come to."""


# --- changing bytes and texts


def _changed(data: bytes, random: Random) -> bytes:
    """`data` with a few bytes flipped, cut, repeated, or replaced by something hostile."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at = random.randrange(len(found) + 1)
        to = min(len(found), at + random.choice((1, 1, 4, 30, 400)))
        match random.randrange(5):
            case 0:
                found[at:to] = bytes(random.randrange(256) for _ in range(to - at))
            case 1:
                del found[at:to]
            case 2:
                found[at:at] = found[at:to] * random.choice((1, 2, 50))
            case 3:
                found[at:at] = random.choice(_HOSTILE).encode("utf-8", "surrogatepass")
            case _:
                if at < len(found):
                    found[at] ^= 1 << random.randrange(8)
    return bytes(found)


def _changed_cells(text: str, random: Random) -> str:
    """`text` with a few of its words, cells or numbers replaced by something hostile."""
    words = re.split(r"([\t\n ,:+=\[\]{}\"]+)", text)
    for _ in range(random.choice((1, 1, 2, 5, 30))):
        words[random.randrange(0, len(words), 2)] = random.choice(_HOSTILE)
    return "".join(words)


def _changed_json(value: Any, random: Random) -> Any:
    """`value` with one of its parts replaced by something hostile."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        return {**value, name: _changed_json(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        return [*value[:at], _changed_json(value[at], random), *value[at + 1 :]]
    return random.choice(
        (None, True, -1, 0, 2**31, 10**30, 10**400, 1e308, 1e-320, float("nan"), float("inf"), "",
         "x", "\ud800", [], {}, [[]], [1] * 5000, {"0": 1}, [None] * 4)
    )  # fmt: skip


def _sealed(text: str, random: Random) -> str:
    """`text` with the content that its head should have, mostly: else nothing deeper is reached."""
    if random.random() < 0.1:
        return text
    bare = re.sub("# content = .*\n", "", text)
    if random.random() < 0.3:
        return bare
    content = hashlib.sha256(bare.encode("utf-8", "replace")).hexdigest()[:32]
    return re.sub("(# rows = .*\n)", rf"\1# content = {content}\n", bare, count=1)


# --- what is good


@cache
def _good() -> tuple[Table, ...]:
    """A few tables that ship, with every twelfth row."""
    names = ("h200_deepseek-v3.2_h128_fp8", "h200_deepseek-v4_h128_fp8")
    every = [read_text(path) for path in shipped() if path.stem in names]
    return tuple(replace(table, measurements=table.measurements[::12]) for table in every)


@cache
def _good_text(number: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "good.tsv")
        write_text(_good()[number], path)
        return path.read_text(encoding="utf-8")


@cache
def _loose_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loose.db")
        path.write_bytes(_good_database())
        loosen(path)
        return path.read_bytes()


@cache
def _good_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder, "good.db"), Path(folder, "good.tsv")
        with Store.open(path) as store:
            for number, table in enumerate(_good()):
                text.write_text(_good_text(number))
                import_text(store, text)
                store.add_check(Check(table.key.digest, "1", (), "2026", True, 0.0, ()))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            # The same bytes each time, so that a case can be repeated.
            connection.executescript(
                "UPDATE runs SET started_at = '2026', ended_at = '2026';"
                "UPDATE nsa_tune_migrations SET applied_at = '2026'; VACUUM;"
            )
        return path.read_bytes()


# --- using it


def _use(path: Path, number: int, random: Random) -> bool:
    """Open `path` for the key of a good table as an engine would, and ask; whether it was the one
    that answered."""
    key = _good()[number].key
    dispatcher = Dispatcher.open(
        path, key.gpu, model=key.model, heads=key.heads,
        kv_dtype="bf16" if key.kv_layout == "bf16" else "fp8",
    )  # fmt: skip
    device = dispatcher.setting.device
    if (device.arch, device.sms, device.shared_memory_optin) != ("sm90", 132, 232448):
        raise Finding(f"limits are computed for {device}")
    for batch in random.sample(_BATCHES, 3):
        plan = dispatcher.plan(batch)
        if random.random() < 0.2:
            for name in dispatcher.questions(batch.mode):
                _ = plan.reasons[name].text
            dispatcher.explain(batch)
    if random.random() < 0.2:
        dispatcher.captured(random.choice((1, 64)), random.choice((1, 2)))
    if random.random() < 0.1:
        dispatcher.reload()
    return str(path) in dispatcher.source


def _text(random: Random, folder: Path) -> bool:
    number = random.randrange(len(_good()))
    good, path = _good_text(number), folder / "a.tsv"
    if random.random() < 0.5:
        text = _sealed(_changed_cells(good, random), random)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(_changed(good.encode(), random))
    with suppress(NsaTuneError):
        table = read_text(path)
        if random.random() < 0.1:
            as_json(build([table])).encode()
        if random.random() < 0.1:
            with Store.open(folder / "b.db") as store:
                import_text(store, path)
    return _use(path, number, random)


def _sql(path: Path, random: Random) -> None:
    """Change some values of a database, or its schema."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for _ in range(random.choice((1, 1, 3))):
            name = random.choice(list(COLUMNS))
            column = random.choice(COLUMNS[name])
            value: Any = random.choice(_HOSTILE)
            if random.random() < 0.5:
                value = random.choice((None, 0, -1, 2**62, 1e308, 1e-320, float("inf"), b"\xff", 5))
            elif random.random() < 0.2:
                value = json.dumps(_changed_json({"torch": "1", "points": ["decode"]}, random))
            where = random.choice(
                ("", "WHERE rowid % 3 = 0", "WHERE rowid = 1",
                 f"WHERE rowid = (SELECT max(rowid) FROM {name})")
            )  # fmt: skip
            with suppress(sqlite3.Error, UnicodeEncodeError):
                connection.execute(f"UPDATE {name} SET {column} = ? {where}", [value])
            if random.random() < 0.1:
                with suppress(sqlite3.Error):
                    connection.execute(
                        random.choice(
                            (f"DROP TABLE {name}", f"DELETE FROM {name}",
                             f"ALTER TABLE {name} DROP COLUMN {column}",
                             f"ALTER TABLE {name} RENAME TO other")
                        )
                    )  # fmt: skip
        connection.commit()


def _changed_pages(data: bytes, random: Random) -> bytes:
    """`data` with a few of its pages overwritten: by nothing, by noise, or by another page."""
    size = int.from_bytes(data[16:18], "big")
    pages = [data[at : at + size] for at in range(0, len(data), size)]
    for _ in range(random.choice((1, 1, 2, 5))):
        number = random.randrange(len(pages))
        pages[number] = random.choice(
            (bytes(size), random.randbytes(size), random.choice(pages), pages[number][: size // 2]
             + random.randbytes(size - size // 2))
        )  # fmt: skip
    return b"".join(pages)


def _bad_database(path: Path, random: Random) -> None:
    data = random.choice((_good_database, _loose_database))()
    match random.randrange(4):
        case 0 | 1:
            path.write_bytes(data)
            _sql(path, random)
        case 2:
            path.write_bytes(_changed_pages(data, random))
        case _:
            path.write_bytes(_changed(data, random))


def _sqlite(random: Random, folder: Path) -> bool:
    path = folder / "a.db"
    _bad_database(path, random)
    for read in _READERS:
        with suppress(NsaTuneError):
            read(path)
    used = _use(path, random.randrange(len(_good())), random)
    with suppress(NsaTuneError), Store.open(path) as store:
        for table in read_database(path):
            store.current(table.key)
    return used


_MOONCAKE = (
    '{"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [0, 7]}\n'
    '{"timestamp": 500, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}\n'
)
_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def _trace(random: Random, folder: Path) -> bool:
    path, good = folder / "trace", random.choice((_MOONCAKE, _AZURE))
    if random.random() < 0.6:
        path.write_bytes(_changed_cells(good, random).encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(_changed(good.encode(), random))
    weighted_batches.weighted_batches(path, drawn=9)
    return True


@cache
def _good_log() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        log = DecisionLog(path)
        for batch in (
            *_BATCHES,
            Batch.from_totals(mode="extend", q_tokens=9, kv_tokens=9, max_kv=9),
        ):
            log.write(3, batch, own={"decode": None}, taken={"decode": "fa3"},
                      table={"gpu": "g", "model": "m", "heads": 1, "kv_layout": "l"})  # fmt: skip
        return path.read_text()


def _log(random: Random, folder: Path) -> bool:
    path, lines = folder / "log", _good_log().split("\n")
    at = random.randrange(len(lines) - 1)
    if random.random() < 0.6:
        lines[at] = json.dumps(_changed_json(json.loads(lines[at]), random))
        path.write_text("\n".join(lines))
    else:
        path.write_bytes(_changed("\n".join(lines).encode(), random))
    used = len(list(read_decisions(path))) > 0
    with suppress(NsaTuneError):
        weighted_batches.weighted_batches(path, drawn=9)
    return used


# --- HTTP

_REQUESTS = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    b"GET /api/live HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: \"x\", W/\"y\"\r\n\r\n",
    b"GET /?table=0123&table=%ff HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n",
    b"HEAD /assets/page.css HTTP/1.0\r\nHost: [::1]:80\r\nCookie: nsa_tune_token=a\r\n\r\n",
    b"POST /api/report HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /?token=abc HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer abc\r\n"
    b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
)  # fmt: skip


class _Alarms(logging.Handler):
    """Keeps what a server logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextmanager
def _dashboards() -> Iterator[Case]:
    """The target over a dashboard."""
    alarms = _Alarms()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addHandler(alarms)
    with tempfile.TemporaryDirectory() as folder:
        text, database = Path(folder, "a.tsv"), Path(folder, "a.db")
        text.write_text(_good_text(0))
        database.write_bytes(_good_database())
        with served(text, database) as running:
            logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
            yield partial(_http, running.port, alarms)


def _http(port: int, alarms: _Alarms, random: Random, folder: Path) -> bool:
    del folder
    data = random.choice(_REQUESTS)
    if random.random() < 0.9:
        data = _changed(data, random)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                answer += more[: max(200 - len(answer), 0)]
    if alarms.texts:
        raise Finding(alarms.texts.pop())
    if re.match(rb"HTTP/1.1 5", answer):
        raise Finding(repr(answer))
    return answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 30"))


def _upload(random: Random, folder: Path) -> bool:
    """A table that somebody pushes to a service whose database holds the good ones."""
    good = _good_text(random.randrange(len(_good())))
    text = _sealed(_changed_cells(good, random), random)
    if random.random() < 0.5:
        # Rows alone, of a table that would be taken: so that more is stored.
        head, rows = good.split("\npoint\t")
        text = _sealed(f"{head}\npoint\t{_changed_cells(rows, random)}", random)
    path = folder / "a.db"
    path.write_bytes(_good_database())
    upload = folder / "x.tsv"
    upload.write_bytes(text.encode("utf-8", "replace"))
    with Store.open(path) as store:
        merge(store, upload, checked(upload))
    try:
        found = read_database(path)
        with closing(Index(path)) as index:
            of_keys(path, index.held().entries, folder / "copy.db")
        read_database(folder / "copy.db")
    except NsaTuneError as error:
        raise Finding(f"an upload has spoiled the database: {error}") from error
    if len(found) < len(_good()):
        raise Finding("an upload has hidden a table")
    for number in range(len(_good())):
        _use(path, number, random)
    return True


_BODY = {
    "key": {"gpu": "NVIDIA H200", "model": "deepseek-v3.2", "heads": 128, "kv_layout": "fp8_packed",
            "driver": "1", "libraries": {"torch": "1"}, "protocol": "cuda-graph/2"},
    "point": "prefill", "drift": 0.1,
}  # fmt: skip


def _service(random: Random, folder: Path) -> bool:
    """What hosts say to a service: that a table is wanted, that it no longer holds, what ran."""
    keys = [table.key for table in _good()]
    with State.open(folder / "s.db") as state:
        demand = Demand(state, Jobs(state))
        body = json.dumps(_changed_json({**_BODY, "key": random.choice(
            (_BODY["key"], keys[0].digest)
        )}, random)).encode()  # fmt: skip
        if random.random() < 0.3:
            body = _changed(body, random)
        said = parsed(body)
        key = said.get("key")
        with suppress(NsaTuneError):
            demand.wanted(Target.of(key if isinstance(key, dict) else said), keys, "x")
        with suppress(NsaTuneError):
            demand.found(said, keys, "x")
        json.dumps([job.as_document() for job in Jobs(state).all()]).encode()
        lines = _good_log().replace('"m"', '"deepseek-v3.2"').split("\n")
        lines[0] = json.dumps(_changed_json(json.loads(lines[0]), random))
        weights = BatchWeights(state)
        (folder / "log").write_text("\n".join(lines))
        weights.add(folder / "log", "x")
        weights.log_for(Target("g", "deepseek-v3.2", 1, "l"))
    return True


# --- what other hosts share


def _merge(random: Random, folder: Path) -> bool:
    """A stranger's database or text table, merged into a database that holds the good ones."""
    path, own = folder / random.choice(("a.db", "a.tsv")), folder / "own.db"
    own.write_bytes(_good_database())
    if path.suffix == ".tsv":
        good = _good_text(random.randrange(len(_good())))
        text = _sealed(_changed_cells(good, random), random)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        _bad_database(path, random)
    try:
        with Store.open(own) as store:
            merged = merge_file(store, path)
            for key in merged.keys:
                store.current(key)
    finally:
        try:
            found = read_database(own)
        except NsaTuneError as error:
            raise Finding(f"a merge has spoiled the database: {error}") from error
        if len(found) < len(_good()):
            raise Finding("a merge has hidden a table")
    for number in range(len(_good())):
        _use(own, number, random)
    return True


def _answer(random: Random, folder: Path) -> bool:
    """What a server answers to a host that opens its database."""
    data = _good_database()
    if random.random() < 0.5:
        data = _changed(data, random)
    digest = hashlib.sha256(data).hexdigest()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nX-Content-SHA256: {digest}\r\n"
        f'ETag: "sha256-{digest}"\r\nConnection: close\r\n\r\n'
    ).encode()
    if random.random() < 0.5:
        head = _changed(head, random)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(head + data)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        os.environ["NSA_TUNE_DB_TIMEOUT_S"] = "20"
        address = Address.of(f"http://127.0.0.1:{port}")
        found = fetched(address, folder, newest_in, again=True)
        thread.join()
    if found.path is None:
        return False
    if found.path.read_bytes() != data:
        raise Finding("something else was kept than was sent")
    _use(found.path, 0, random)
    return True


TARGETS: dict[str, Case] = {
    "text": _text, "sqlite": _sqlite, "trace": _trace, "log": _log,
    "upload": _upload, "service": _service,
}  # fmt: skip
"""By name; `http` needs a server and is made by `fuzz`."""
TARGETS.update(merge=_merge, answer=_answer)


# --- running


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _TooLong(f"{_CASE_S} s of CPU")


def _tried(case: Case, seed: str) -> str:
    """What a case came to: "used", "passed over" or "refused", or else a traceback."""
    signal.setitimer(signal.ITIMER_PROF, _CASE_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return "used" if case(Random(seed), Path(folder)) else "passed over"
    except NsaTuneError:
        return "refused"
    except Exception:  # noqa: BLE001 - every other one is a finding
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz(
    targets: list[str], *, seed: int, seconds: float, most: int | None = None, first: int = 0
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Run cases of `targets` in turn, for `seconds` or `most` of each; the counts of outcomes by
    target, and the findings."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in targets}
    findings: list[str] = []
    signal.signal(signal.SIGPROF, _on_alarm)
    weighted_batches._MOST_PASSES = 3000
    end = monotonic() + seconds
    with _dashboards() as http:
        cases = {**TARGETS, "http": http}
        for number in count(first):
            if monotonic() >= end or (most is not None and number >= first + most):
                break
            for name in targets:
                # Targets that take a millisecond have ten cases where others have one.
                each = 1 if name not in _QUICK or most is not None else 10
                for case in range(each * number, each * (number + 1)):
                    outcome = _tried(cases[name], f"{seed} {name} {case}")
                    if "\n" in outcome:
                        words = f"--seed {seed} --target {name} --case {case}"
                        findings.append(f"python -m tests.fuzz {words}\n{outcome}")
                        outcome = "FINDING"
                    counts[name][outcome] += 1
    return counts, findings


def main() -> int:
    """Print the counts and the findings; 1 when there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=[*TARGETS, "http"])
    parser.add_argument("--case", type=int)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    counts, findings = fuzz(
        [given.target] if given.target else [*TARGETS, "http"], seed=given.seed,
        seconds=given.seconds, most=None if given.case is None else 1, first=given.case or 0,
    )  # fmt: skip
    for finding in findings[:20]:
        sys.stdout.write(f"{finding}\n")
    for name, found in counts.items():
        total, words = sum(found.values()), ", ".join(f"{n} {what}" for what, n in found.items())
        sys.stdout.write(f"{name}: {total} cases: {words}\n")
    sys.stdout.write(f"{len(findings)} findings\n")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
