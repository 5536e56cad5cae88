"""A worker: whose jobs it takes, what it pushes, and how it leaves. Nothing is measured here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.runner.progress import Progress, Stored
from nsa_tune.autotune.runner.run import RunRequest
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Device, Key
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.fleet import worker
from nsa_tune.fleet.service.auth.tokens import Role
from nsa_tune.fleet.service.tables import uploads
from nsa_tune.fleet.worker import WorkerRequest, work
from nsa_tune.remote.client import Client, Refused
from tests.fleet.service.made_up_tables import grown, text_of
from tests.fleet.service.served import Served, served, until
from tests.records import ok
from tests.reports.synthetic import toy_point
from tests.shell import Shell

JOB = {"gpu": detect.cpu_name(), "model": "tiny", "kv_dtype": "fp8"}
KEY = Key(detect.cpu_name(), "", detect.library_versions(), "tiny", 4, "fp8_packed", "cpu-clock/1")
Run = Callable[[RunRequest, Any], Any]


class Outcome:
    """What a run of two rows came to."""

    outcome, measured, failed, skipped = "done", 2, 0, 0


def store_rows(request: RunRequest, batches: int = 1) -> None:
    """What a run does to the worker's database."""
    with Store.open(request.database) as store:
        run = store.begin_run(KEY, Device(KEY.gpu, "cpu"), {})
        for batch in range(batches):
            store.add(run, [ok(f"extend:0+{16 * (1 + batch)}", arm) for arm in ("a", "b")])
        store.end_run(run, "done")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "t.db", lease_s=0.4) as running:
        yield running


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """The runs that were asked for, each of which stores two rows."""
    asked: list[RunRequest] = []

    def run(request: RunRequest, progress: object) -> Outcome:
        asked.append(request)
        store_rows(request)
        return Outcome()

    monkeypatch.setattr(worker, "run", run)
    return asked


class Host:
    """A worker in this process."""

    def __init__(self, service: Served, folder: Path) -> None:
        self.request = WorkerRequest(folder / "w.db", "cpu", "host", wait=False)
        self.client = Client(service.url, service.tokens[Role.SUBMIT], patience_s=5)
        self.said: list[str] = []

    def work(self, **changes: Any) -> int:
        """How many jobs it did."""
        request = replace(self.request, **changes)
        return work(self.client, request, self.said.append, Progress())


@pytest.fixture
def host(service: Served, tmp_path: Path) -> Host:
    return Host(service, tmp_path)


def _add(service: Served, **changes: object) -> None:
    assert service.post("/v1/jobs", {**JOB, **changes}, role=Role.ADMIN).status == 201


def _states(service: Served) -> list[tuple[str, str]]:
    jobs = service.get("/v1/jobs").document["jobs"]
    return [(one["state"], one["message"]) for one in reversed(jobs)]


def test_jobs_are_done_one_after_the_other(
    service: Served, host: Host, runs: list[RunRequest]
) -> None:
    _add(service, points=["prefill"], budget_s=5)
    _add(service, heads=2, kv_dtype="bf16", fresh=True)
    assert host.work() == 2
    assert [(run.model, run.heads, run.kv_dtype, run.points, run.budget_s, run.fresh)
            for run in runs] == [
        ("tiny", 4, "fp8", ("prefill",), 5.0, False), ("tiny", 2, "bf16", (), None, True),
    ]  # fmt: skip
    words = "done, 2 measured, 0 of them failed, 0 known before"
    assert _states(service) == [("done", words)] * 2
    assert host.said == [f"job 1 is done: {words}", f"job 2 is done: {words}"]
    (table,) = service.get("/v1/tables").document["tables"]
    assert (table["digest"], table["rows"]) == (KEY.digest, 2)


def test_what_others_measured_of_a_job_is_taken_over(
    service: Served, host: Host, runs: list[RunRequest]
) -> None:
    known = replace(grown(3, KEY), device=Device(KEY.gpu, "cpu"))
    for table in (known, grown(2)):
        assert service.post("/v1/tables", text_of(table)).status == 200
    _add(service)
    host.work()
    (own,) = read_database(host.request.database)
    assert len(own.measurements) == 6 + 2
    _add(service, fresh=True)
    host.work(database=host.request.database.with_name("new.db"))
    (own,) = read_database(host.request.database.with_name("new.db"))
    assert len(own.measurements) == 2, "what is to be measured again is not taken over"


def test_what_engines_ran_is_measured_too(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []

    def run(request: RunRequest, progress: object) -> Outcome:
        assert request.trace is not None
        traces.append(request.trace.read_text())
        store_rows(request)
        return Outcome()

    monkeypatch.setattr(worker, "run", run)
    line = (
        f'{{"schema": "nsa-tune/decision/1", "time": 1, "gpu": "{KEY.gpu}", "model": "tiny", '
        '"heads": 4, "kv_layout": "fp8_packed", "count": 3, "batch": "extend:0+16", "own": {}, '
        '"taken": {}}\n'
    )
    assert service.post("/v1/decisions", line.encode()).document["decisions"] == 3
    _add(service)
    host.work()
    assert '"count": 3, "batch": "extend:0+16"' in traces[0]


def test_rows_are_pushed_while_the_job_goes_on(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def run(request: RunRequest, progress: object) -> Outcome:
        store_rows(request)
        until(lambda: service.get("/v1/jobs").document["jobs"][0]["rows"] == 2)
        seen.append(service.get("/v1/tables").document["tables"][0]["rows"])
        return Outcome()

    monkeypatch.setattr(worker, "run", run)
    _add(service)
    assert host.work() == 1
    assert seen == [2]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("no kernel answers here", "no kernel answers here"),
        ("it ended: \x1b[31mCUDA error\x1b[0m\tin a.cu\n" + "x" * 500,
         "it ended:  [31mCUDA error [0m in a.cu ".ljust(400, "x")),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_measured_is_failed_with_its_reason_in_a_plain_line(
    reason: str, message: str, service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "run", Mock(side_effect=MachineUnfit(reason)))
    _add(service)
    host.work()
    assert _states(service) == [("failed", message)]
    assert host.said == [f"job 1 failed: {reason}"]


def test_a_cancelled_job_is_left_after_its_batch(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: RunRequest, progress: Any) -> Any:
        store_rows(request)
        assert service.post("/v1/jobs/1/cancel", {}, role=Role.ADMIN).status == 200
        try:
            for _ in range(600):
                progress.batch(Stored(1, 2, toy_point(), Batch.extend([0], [1]), [], 0.0))
                threading.Event().wait(0.05)
        except KeyboardInterrupt:
            outcome = Outcome()
            outcome.outcome = "interrupted"
            return outcome
        raise AssertionError("the run was not ended")

    monkeypatch.setattr(worker, "run", run)
    _add(service)
    assert host.work() == 1
    assert host.said[0].startswith("job 1 was left: ")
    assert _states(service)[0][0] == "cancelled"
    assert service.get("/v1/tables").document["tables"][0]["rows"] == 2, "its rows are kept"


def test_a_worker_that_is_interrupted_gives_its_job_back(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: RunRequest, progress: object) -> Outcome:
        store_rows(request)
        outcome = Outcome()
        outcome.outcome = "interrupted"
        return outcome

    monkeypatch.setattr(worker, "run", run)
    _add(service)
    with pytest.raises(KeyboardInterrupt):
        host.work()
    assert _states(service)[0][0] == "queued"
    assert service.get("/v1/tables").document["tables"][0]["rows"] == 2


def test_rows_of_a_killed_worker_are_pushed_by_the_next(
    service: Served, host: Host, runs: list[RunRequest]
) -> None:
    store_rows(RunRequest(host.request.database), batches=3)
    assert host.work() == 0
    assert host.said == [
        f"pushed 6 measurements that an earlier worker had left in {host.request.database}"
    ]
    assert host.work() == 0
    assert len(host.said) == 1
    assert service.get("/v1/tables").document["tables"][0]["rows"] == 6


@pytest.mark.parametrize("limit", ["clock", "room"])
def test_one_table_that_is_refused_keeps_no_worker_from_work(
    limit: str, service: Served, host: Host, runs: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(KEY, heads=2)
    later = datetime.now(UTC) + timedelta(hours=3)
    with Store.open(host.request.database) as store:
        for key in (other, KEY):
            run = store.begin_run(key, Device(key.gpu, "cpu"), {})
            at = later if (key, limit) == (other, "clock") else datetime.now(UTC)
            with patch("nsa_tune.db.store._now", at.isoformat):
                store.add(run, [ok("extend:0+16", arm) for arm in ("a", "b")])
            store.end_run(run, "done")
    if limit == "room":
        monkeypatch.setattr(uploads, "MOST_KEYS", 0)
    _add(service)
    host.client.patience_s = 0.2
    assert host.work() == 1
    refused = [line for line in host.said if "does not take the table" in line]
    assert len(refused) == (1 if limit == "clock" else 2)
    assert other.digest in refused[0]
    assert len(read_database(host.request.database)) == 2, "it is kept"


@pytest.mark.parametrize("minutes", [-6, 6])
def test_nothing_is_measured_while_the_clock_is_wrong(
    minutes: int, service: Served, host: Host, runs: list[RunRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(minutes=minutes)

    # A worker that asks no clock is measuring with a wrong one.
    monkeypatch.setattr(worker, "datetime", Wrong, raising=False)
    _add(service)
    way = "ahead of" if minutes > 0 else "behind"
    with pytest.raises(MachineUnfit, match=f"clock is 6 minutes {way} the service's"):
        host.work()
    assert runs == []
    assert _states(service)[0][0] == "queued"


def test_a_service_that_is_gone_ends_the_worker_and_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "t.db") as service:
        host = Host(service, tmp_path)
        _add(service)
        claimed = threading.Event()

        def run(request: RunRequest, progress: object) -> Outcome:
            claimed.set()
            assert gone.wait(30)
            store_rows(request)
            return Outcome()

        gone = threading.Event()
        monkeypatch.setattr(worker, "run", run)
        host.client.patience_s = 0.5
        found: list[Exception] = []

        def background() -> None:
            try:
                host.work()
            except Refused as error:
                found.append(error)

        thread = threading.Thread(target=background)
        thread.start()
        assert claimed.wait(30)
    gone.set()
    thread.join(60)
    assert "cannot be reached" in str(found[0])
    (own,) = read_database(host.request.database)
    assert len(own.measurements) == 2


# --- idle


def test_no_job_is_taken_while_others_compute(
    service: Served, host: Host, runs: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = nvml.GpuState(1, 1, 1, 40, (), unsteady=False, processes=(4242,))
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setattr(nvml, "gpu_state", lambda gpu: state if gpu == 1 else None)
    _add(service, gpu="NVIDIA H200", model="deepseek-v3.2")
    assert host.work(device="cuda:1") == 0
    assert host.said == ["process 4242 computes here: no job is taken meanwhile"]
    assert _states(service)[0][0] == "queued"
    assert host.work(device="cuda:1", busy=True) == 1
    assert runs[0].device == "cuda:1"


def test_visible_gpus_are_those_that_cuda_counts(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200"] * 4)
    monkeypatch.setattr(nvml, "gpu_state", asked.append)
    for visible, device in (("2,3", "cuda:1"), ("2,3", "all"), ("GPU-abc", "auto")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        host.work(device=device)
    assert asked == [3, 2, 3, "GPU-abc"]
    with pytest.raises(MachineUnfit, match="no device cuda:7 here"):
        host.work(device="cuda:7")


def test_a_host_of_different_gpus_has_a_worker_for_each(
    service: Served, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H100", "NVIDIA H200"])
    monkeypatch.setattr(nvml, "gpu_state", lambda gpu: None)
    for visible, device in (("0,1", "all"), ("GPU-abc", "auto"), ("7", "auto")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(MachineUnfit, match="--device cuda:N"):
            host.work(device=device)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert host.work(device="cuda:1") == 0
    (seen,) = service.get("/v1/workers").document["workers"]
    assert seen["gpu"] == "NVIDIA H200"


# --- on the command line


def test_the_command_says_what_it_did(
    service: Served, shell: Shell, runs: list[RunRequest], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place = "--device", "cpu", "--no-wait", "--db", str(tmp_path / "w.db"), "--quiet"
    assert "set NSA_TUNE_TOKEN" in shell("worker", service.url, *place).err
    monkeypatch.setenv("NSA_TUNE_TOKEN", "nst_wrong")
    refused = shell("worker", service.url, *place)
    assert refused.code == 1
    assert "this token is not known here, or was revoked" in refused.err
    monkeypatch.setenv("NSA_TUNE_TOKEN", service.tokens[Role.READ])
    assert "has the role read, and this needs submit" in shell("worker", service.url, *place).err
    monkeypatch.setenv("NSA_TUNE_TOKEN", service.tokens[Role.SUBMIT])
    assert "give the address of a service" in shell("worker", *place).err
    _add(service)
    monkeypatch.setenv("NSA_TUNE_SERVICE", service.url)
    done = shell("worker", *place)
    assert done.code == 0
    assert "job 1 is done" in done.err
    assert "1 job done" in done.err


def test_an_admin_runs_the_queue_from_the_command_line(
    service: Served, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_SERVICE", service.url)
    monkeypatch.setenv("NSA_TUNE_TOKEN", service.tokens[Role.ADMIN])
    service.post("/v1/wanted", JOB)
    assert "1  proposed" in shell("job", "list").out
    assert "1  queued" in shell("job", "approve", "1").err
    added = shell("job", "add", "--gpu", "NVIDIA H200", "--model", "deepseek-v3.2", "--heads", "16",
                  "--points", "decode,prefill", "--fresh", "--budget", "60")  # fmt: skip
    assert "2  queued  NVIDIA H200, deepseek-v3.2, 16 local heads" in added.err
    assert "1  cancelled" in shell("job", "cancel", "1").err
    assert shell("job", "list", "--state", "no such&").code == 0
    listed = shell("job", "list", "--state", "queued", "--json")
    assert '"schema": "nsa-tune/jobs/1"' in listed.out
    assert '"points": ["decode", "prefill"], "fresh": true, "budget_s": 60.0' in listed.out
    again = shell("job", "approve", "1")
    assert (again.code, "job 1 is cancelled and cannot be approved" in again.err) == (1, True)
    service.post("/v1/wanted", {**JOB, "heads": 2})
    assert "1 job: done" in shell("job", "cancel", "--by", "submit").err
    assert "0 tables: done" in shell("job", "forget", "--gpu", "junk").err
    assert shell("job", "cancel").code == shell("job", "forget").code == 2
    monkeypatch.setenv("NSA_TUNE_TOKEN", service.tokens[Role.READ])
    assert "needs admin" in shell("job", "cancel", "2").err


def test_a_host_asks_for_the_table_of_its_own_libraries(
    service: Served, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_SERVICE", service.url)
    monkeypatch.setenv("NSA_TUNE_TOKEN", service.tokens[Role.READ])
    other = "job", "ask", "--gpu", "NVIDIA H200", "--heads", "16"
    assert "(no table, and read asked for it)" in shell(*other).out
    assert "1  proposed  NVIDIA H200, deepseek-v3.2, 16 local heads" in shell(*other).out

    old = replace(grown(1, replace(KEY, libraries=())), device=Device(KEY.gpu, "cpu"))
    assert service.post("/v1/tables", text_of(old)).status == 200
    asked = shell("job", "ask", "--json")
    assert '"schema": "nsa-tune/wanted/1", "table": null' in asked.out
    assert "no table of these libraries" in asked.out
    own = replace(old, key=KEY)
    assert service.post("/v1/tables", text_of(own)).status == 200
    assert shell("job", "ask").out == f"there is a table: {KEY.digest}\n"


def test_a_refusal_other_than_a_lost_job_is_no_success(
    service: Served, host: Host, runs: list[RunRequest]
) -> None:
    host.client = Client(service.url, service.tokens[Role.READ])
    with pytest.raises(Refused):
        host.work()
    assert runs == []


# --- another server


_JOB: dict[str, object] = {
    **JOB, "id": 1, "heads": 4, "kv_layout": "fp8_packed", "budget_s": None, "fresh": False,
    "points": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "ok"},
        {"job": {"id": 1}, "lease_s": 60},
        {"job": "none", "lease_s": 60},
        {"job": {**_JOB, "points": None}, "lease_s": 60},
        {"job": {**_JOB, "points": [["x"]]}, "lease_s": 60},
        {"job": {**_JOB, "model": ["a"]}, "lease_s": 60},
        {"job": {**_JOB, "kv_dtype": {}}, "lease_s": 60},
        {"job": {**_JOB, "id": "../../x"}, "lease_s": 60},
        {"job": {**_JOB, "heads": True}, "lease_s": 60},
        {"job": _JOB, "lease_s": "soon"},
    ],
)
def test_a_job_of_another_server_is_refused_in_a_sentence(
    host: Host, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]
) -> None:
    monkeypatch.setattr(Client, "post", lambda *_: answer)
    with pytest.raises(Refused, match=r"is it a service of nsa-tune\?"):
        host.work()


@pytest.mark.parametrize("url", [".evil.org/x", "@evil.org/", "/v1/tables/../x", ":9/", "//e/"])
def test_the_token_goes_to_no_address_that_an_answer_makes_up(
    url: str, service: Served, host: Host, runs: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    table = {**{name: getattr(KEY, name) for name in ("gpu", "model", "heads", "kv_layout")},
             "driver": KEY.driver, "libraries": dict(KEY.libraries), "url": url}  # fmt: skip

    def get(self: Client, path: str) -> bytes:
        asked.append(path)
        return json.dumps({"tables": [table]}).encode()

    monkeypatch.setattr(Client, "get", get)
    _add(service)
    host.work()
    assert url not in asked
    assert runs == []
    assert "addresses of tables are" in host.said[-1]


@pytest.mark.parametrize(
    "answer", [{"status": "ok"}, {"jobs": [{"id": 1}]}, {"jobs": ["one"]}, {"jobs": 1}]
)
def test_jobs_of_another_server_are_refused_in_a_sentence(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]
) -> None:
    monkeypatch.setenv("NSA_TUNE_SERVICE", "http://127.0.0.1:9")
    monkeypatch.setenv("NSA_TUNE_TOKEN", "nst_x")
    monkeypatch.setattr(Client, "document", lambda *_: answer)
    monkeypatch.setattr(Client, "post", lambda *_: answer)
    for words in (("list",), ("approve", "1"), ("cancel", "1"), ("ask", "--gpu", "NVIDIA H200")):
        said = shell("job", *words)
        assert (said.code, "is it a service of nsa-tune?" in said.err) == (1, True), words
