"""`nsa-tune worker`: asks a service for jobs, measures them here, and pushes the rows.

What is measured is in the worker's own database first, and goes to the service from there while
the run goes on. So neither a service that is away nor a worker that is killed loses a row: a
worker pushes what it has when it starts, and what is known already does not count twice.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from nsa_tune._errors import MachineUnfit, NsaTuneError, StoreMissing
from nsa_tune.autotune.bench.device_names import ALL, check_device
from nsa_tune.autotune.runner.progress import Progress, Stored, Together
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.hardware.visible import visible_gpus
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.exchange import import_text
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.fleet.push import push_table
from nsa_tune.remote.client import Client, Refused, reading

_BEATS_A_LEASE = 4
_LONGEST_BEAT_S = 15.0
_TARGET_REGRET = 0.01
"""As `nsa-tune run` without options."""
_LONGEST_MESSAGE = 400
"""Characters that a service takes of what became of a job."""
_CLOCK_S = 300.0
"""That a worker's clock may differ from the service's."""
_FACTS: Mapping[str, tuple[type, ...]] = {
    "id": (int,), "gpu": (str,), "model": (str,), "heads": (int,), "kv_dtype": (str,),
    "kv_layout": (str,), "budget_s": (float, int, type(None)), "fresh": (bool,),
}  # fmt: skip
"""What a worker reads of a job beside its points, and of which kind it is."""
_OF_A_TABLE = "gpu", "model", "heads", "kv_layout"
_TABLE = re.compile("/v1/tables/[0-9a-f]{64}")
_NOT_MINE, _NO_ENTRY = 409, (401, 403)
"""Answers of the service: the job went to somebody else; the token does not suffice."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The options of `nsa-tune worker`."""

    database: Path
    """Where rows go before they are pushed."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:N", or "all": every GPU of this host, which must be alike."""
    name: str = field(default_factory=socket.gethostname)
    """What the service calls this worker."""
    busy: bool = False
    """Measure also while others compute on the GPU."""
    wait: bool = True
    """Ask again when there is no job. Otherwise the worker ends then."""
    poll_s: float = 30.0
    """Between two questions."""


def work(
    client: Client, request: WorkerRequest, told: Callable[[str], None], progress: Progress
) -> int:
    """Do jobs until there are none, or for ever; how many.

    `told` gets a sentence for each thing that happens.

    Raises:
        MachineUnfit: when there is no such device, or the clock differs from the service's.
        Refused: when the service refuses this worker, or is away for long.
        KeyboardInterrupt: when interrupted. What was measured is pushed, and the job given back.
    """
    check_device(request.device)
    here = _Here.of(request.device)
    _check_clock(client.answer("GET", "/healthz").date)
    _push_leftovers(client, request, told)
    done, others = 0, list[int]()
    while True:
        before, others = others, [] if request.busy else here.others()
        job = None if others else _claimed(client, request, here)
        if job is not None:
            told(job.do(progress))
            done += 1
            continue
        if others and others != before:
            told(f"process {', '.join(map(str, others))} computes here: no job is taken meanwhile")
        if not request.wait:
            return done
        client.given_up.wait(request.poll_s)


def _claimed(client: Client, request: WorkerRequest, here: _Here) -> _Job | None:
    claim = uuid4().hex
    answer = client.post("/v1/jobs/claim", here.claim(request.name, claim))
    with reading():
        job = answer["job"]
        if job is None:
            return None
        return _Job(client, request, here, _facts(job), claim, float(answer["lease_s"]))


def _facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker reads of a job.

    Raises:
        LookupError, TypeError: when something lacks, or is of another kind.
    """
    facts = {name: job[name] for name in _FACTS} | {"points": tuple(job["points"])}
    for name, kinds in _FACTS.items():
        if type(facts[name]) not in kinds:
            raise TypeError(f"{name} is {facts[name]!r}")
    if not all(isinstance(point, str) for point in facts["points"]):
        raise TypeError(f"points are {facts['points']!r}")
    return facts


def _check_clock(date: str) -> None:
    """Times of measurement decide which rows count.

    Raises:
        MachineUnfit: when this clock is far from the service's, whose answer has the header `date`.
    """
    try:
        ahead_s = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    except (TypeError, ValueError):
        return
    if abs(ahead_s) > _CLOCK_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        raise MachineUnfit(
            f"this host's clock is {abs(ahead_s) / 60:.0f} minutes {way} the service's; set it"
        )


@dataclass(frozen=True, slots=True)
class _Here:
    """This host's device, as keys name it."""

    gpu: str
    driver: str
    libraries: tuple[tuple[str, str], ...]
    gpus: tuple[int | str, ...]
    """NVML's ordinals or UUIDs; none for a CPU."""

    @classmethod
    def of(cls, device: str) -> _Here:
        names = nvml.gpu_names()
        if device == "cpu" or (device == "auto" and not names):
            return cls(detect.cpu_name(), "", detect.library_versions(), ())
        visible = visible_gpus(len(names))
        ordinal = int(device.partition(":")[2] or 0)
        gpus = visible if device == ALL else visible[ordinal:][:1]
        models = set(_names_of(gpus, names))
        if not models:
            raise MachineUnfit(f"there is no device {device} here")
        if len(models) > 1:
            raise MachineUnfit(
                f"the GPUs of this host differ ({', '.join(sorted(models))}): start a worker for "
                "each, with --device cuda:N, and with numbers in CUDA_VISIBLE_DEVICES"
            )
        return cls(models.pop(), detect.driver_version(), detect.library_versions(), gpus)

    def claim(self, worker: str, claim: str) -> dict[str, Any]:
        """The body that asks for a job."""
        return {
            "worker": worker, "claim": claim, "gpu": self.gpu, "driver": self.driver,
            "libraries": dict(self.libraries),
        }  # fmt: skip

    def others(self) -> list[int]:
        """Processes that compute on the device."""
        states = [nvml.gpu_state(gpu) for gpu in self.gpus]
        return sorted({pid for state in states if state for pid in state.processes} - {os.getpid()})

    def owns(self, key: Key) -> bool:
        """Whether `key` is one that is measured here."""
        return (key.gpu, key.driver, key.libraries) == (self.gpu, self.driver, self.libraries)


def _names_of(gpus: Iterable[int | str], names: Sequence[str]) -> Iterator[str]:
    """The names of `gpus`, of a host whose GPUs are called `names`."""
    for gpu in gpus:
        if isinstance(gpu, int) and gpu < len(names):
            yield names[gpu]
        else:
            # A UUID, or a number of the host's while only some of its GPUs are in this container.
            yield from names


class _Job(Progress):
    """One job that is this worker's. A run tells it of each batch."""

    def __init__(
        self, client: Client, request: WorkerRequest, here: _Here, facts: Mapping[str, Any],
        claim: str, lease_s: float,
    ) -> None:  # fmt: skip
        self._pause_s = min(lease_s / _BEATS_A_LEASE, _LONGEST_BEAT_S)
        self._client = client
        self._hasty = client.with_patience(self._pause_s)
        self._database = request.database
        self._device = request.device
        self._here = here
        self._facts = facts
        self._claim = claim
        self._pushed: dict[Key, tuple[int, str]] = {}
        self._refused: Refused | None = None
        self._batches = 0, 0
        self._over = threading.Event()

    def do(self, progress: Progress) -> str:
        """Measure; returns what came of it, as a sentence."""
        name = f"job {self._facts['id']}"
        try:
            with self._beating():
                message = self._measured(Together(progress, self))
            self._push(self._client)
            self._end("done", message)
        except Refused as error:
            if error.passing or error.status in _NO_ENTRY:
                raise
            if error.status == _NOT_MINE:
                return f"{name} was left: {error}"
            return self._given_up(error)
        except NsaTuneError as error:
            return self._given_up(error)
        except KeyboardInterrupt:
            self._leave()
            raise
        return f"{name} is done: {message}"

    def _given_up(self, error: NsaTuneError) -> str:
        self._end("failed", str(error))
        return f"job {self._facts['id']} failed: {error}"

    def _measured(self, progress: Progress) -> str:
        facts = self._facts
        with tempfile.TemporaryDirectory(prefix="nsa-tune-job-") as directory:
            folder = Path(directory)
            if not facts["fresh"]:
                self._take_over(folder)
            result = run(
                RunRequest(
                    self._database, self._device, facts["model"], facts["heads"],
                    facts["kv_dtype"], facts["points"], facts["budget_s"], facts["fresh"],
                    _TARGET_REGRET, self._trace(folder),
                ),
                progress,
            )  # fmt: skip
        if result.outcome == "interrupted":
            raise self._refused or KeyboardInterrupt
        return (
            f"{result.outcome}, {result.measured} measured, {result.failed} of them failed, "
            f"{result.skipped} known before"
        )

    def _take_over(self, folder: Path) -> None:
        """What others measured of this job, so that it is not measured again."""
        for url in self._urls():
            path = folder / "service.tsv"
            path.write_bytes(self._client.get(url))
            with Store.open(self._database) as store:
                import_text(store, path)

    def _urls(self) -> list[str]:
        """Of the service's tables of this job that were measured as here."""
        wanted = {name: self._facts[name] for name in _OF_A_TABLE}
        wanted |= {"driver": self._here.driver, "libraries": dict(self._here.libraries)}
        tables = self._client.document(f"/v1/tables?{self._query}")
        with reading():
            urls = [table["url"] for table in tables["tables"] if wanted.items() <= table.items()]
            if not all(_TABLE.fullmatch(url) for url in urls):
                raise ValueError(f"addresses of tables are {urls!r}"[:_LONGEST_MESSAGE])
        return urls

    @property
    def _query(self) -> str:
        return urlencode({name: self._facts[name] for name in _OF_A_TABLE})

    def _trace(self, folder: Path) -> Path | None:
        """What engines run of this table, if the service knows."""
        log = self._client.get(f"/v1/weights?{self._query}")
        if not log:
            return None
        path = folder / "decisions.jsonl"
        path.write_bytes(log)
        return path

    # --- while it is measured

    @contextmanager
    def _beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _beat(self) -> None:
        """Say every few seconds that the job goes on, and push what there is."""
        while not self._over.wait(self._pause_s):
            try:
                self._push(self._hasty)
                self._hasty.post(f"{self._address}/beat", self._words())
            except NsaTuneError as error:
                if isinstance(error, Refused) and not error.passing:
                    self._refused = error
                    return
                # Away, or the database is locked: the run goes on, and the next beat says more.
                continue

    def batch(self, stored: Stored) -> None:
        """Note how far the sweep is; end the run when the service no longer wants it."""
        self._batches = stored.done, stored.total
        if self._refused is not None:
            raise KeyboardInterrupt

    @property
    def _address(self) -> str:
        return f"/v1/jobs/{self._facts['id']}"

    def _words(self) -> dict[str, Any]:
        done, batches = self._batches
        rows = sum(rows for rows, _ in self._pushed.values())
        return {"claim": self._claim, "rows": rows, "batches_done": done, "batches": batches}

    def _push(self, client: Client) -> None:
        """Send the tables of this job that have changed."""
        for table in self._tables():
            state = len(table.measurements), table.measured_at
            if self._pushed.get(table.key) != state:
                push_table(client, table)
                self._pushed[table.key] = state

    def _tables(self) -> list[Table]:
        try:
            tables = read_database(self._database)
        except StoreMissing:
            return []
        return [
            table for table in tables
            if self._here.owns(table.key)
            and all(getattr(table.key, name) == self._facts[name] for name in _OF_A_TABLE)
        ]  # fmt: skip

    def _end(self, how: str, message: str) -> None:
        told = {**self._words(), "message": _one_line(message)}
        self._client.post(f"{self._address}/{how}", told)

    def _leave(self) -> None:
        """Push what there is and give the job back, if the service is there."""
        try:
            self._push(self._hasty)
            self._hasty.post(f"{self._address}/release", self._words())
        except NsaTuneError:
            # The service takes it back itself when nothing is heard of this worker.
            return


def _one_line(message: str) -> str:
    """`message` as a service takes it: what a library wrote may have tabs and escape codes."""
    return "".join(letter if letter.isprintable() else " " for letter in message)[:_LONGEST_MESSAGE]


def _push_leftovers(client: Client, request: WorkerRequest, told: Callable[[str], None]) -> None:
    """Send what an earlier worker had measured when it was killed or the service was away."""
    try:
        tables = read_database(request.database)
    except StoreMissing:
        return
    added = 0
    for table in tables:
        try:
            added += push_table(client, table)
        except Refused as error:
            if error.passing or error.status in _NO_ENTRY:
                raise
            # It stays here; the others shall not wait for it.
            told(f"the service does not take the table {table.key.digest}: {error}")
    if added:
        rows = counted(added, "measurement")
        told(f"pushed {rows} that an earlier worker had left in {request.database}")
