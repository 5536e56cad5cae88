"""Isolation, with real processes: a run survives what its arms do, and records it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from nsa_tune import MachineUnfit
from nsa_tune.autotune.runner import first_calls
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.runner.run import RunRequest, RunResult, run
from nsa_tune.autotune.worker.executor import wait_until_ready
from nsa_tune.autotune.worker.isolated import Deadlines, IsolatedExecutor
from nsa_tune.autotune.worker.messages import Setup
from nsa_tune.backend.types.records import Measurement, Status
from tests.autotune.kills import Trial, processes_of

T = TypeVar("T")
ROOT = Path(__file__).parents[3]


class Remember(Progress):
    """Records the calls."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)


def tuned(
    tmp_path: Path, faults: str, deadlines: Deadlines | None = None, *, fresh: bool = False
) -> tuple[RunResult, Remember]:
    told = Remember()
    request = RunRequest(
        tmp_path / "t.db", device="cpu", fresh=fresh, deadlines=deadlines or Deadlines()
    )
    return run(request, told, registry=f"tests.autotune.faults:{faults}"), told


def rows_of(result: RunResult, arm: str) -> list[Measurement]:
    return [row for row in result.table.measurements if row.arm == arm]


def workers() -> list[int]:
    """Workers of this process that still run."""
    name = b"nsa_tune.autotune.worker.main"
    return [p for p in processes_of(os.getpid()) if name in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_run_survives_every_kind_of_fault_and_names_the_arms(tmp_path: Path) -> None:
    result, told = tuned(tmp_path, "FAULTS")

    assert result.outcome == "done"
    for arm in ("fast", "slow"):
        assert [row.status for row in rows_of(result, arm)] == [Status.OK] * 4
    reasons = {arm: rows_of(result, arm)[0].reason for arm in (
        "segfaults", "exits", "library exits", "nan", "wrong", "raises", "eats memory",
        "does not compile",
    )}  # fmt: skip
    assert reasons["segfaults"] == "killed by SIGSEGV"
    assert reasons["exits"] == ("exit code 1: Assertion failed (kernel.cu:67): smem_size <= limit")
    assert reasons["library exits"].startswith("exit code 1")
    assert reasons["raises"] == "RuntimeError: the kernel says no"
    assert "MemoryError" in reasons["eats memory"]
    assert reasons["does not compile"] == "SyntaxError: the compiler says no"
    assert rows_of(result, "nan")[0].status is rows_of(result, "wrong")[0].status is Status.WRONG

    out = {arm.arm for arm in result.quarantined}
    assert out == set(reasons) - {"eats memory"}
    assert {row.arm for row in result.table.measurements if row.batch == "decode:n1:40x4"} == {
        "fast", "slow", "eats memory",
    }  # fmt: skip
    assert all(len(rows_of(result, arm)) == 3 for arm in out)
    assert result.replaced == 9
    kinds = [incident.kind for incident in told.incidents]
    assert (kinds.count("worker_replaced"), kinds.count("quarantined")) == (9, len(out))
    assert workers() == []

    again, _ = tuned(tmp_path, "FAULTS")
    assert again.replaced == 0, "quarantine outlives the run"
    assert again.measured == len(rows_of(again, "eats memory")) == 4, "memory may be free now"
    assert {arm.arm for arm in again.quarantined} == out


def test_a_fault_that_shows_when_an_arm_is_timed_is_blamed_on_that_arm(tmp_path: Path) -> None:
    result, _ = tuned(tmp_path, "LATE")

    assert {row.arm: row.status for row in result.table.measurements} == {
        "fast": Status.OK, "slow": Status.OK,
        "late segfault": Status.FAILED, "late error": Status.FAILED,
    }  # fmt: skip
    assert rows_of(result, "late segfault")[0].reason == "killed by SIGSEGV"
    assert rows_of(result, "late error")[0].reason == "RuntimeError: an illegal address"
    assert result.replaced == 1


def test_an_arm_that_hangs_is_killed_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_calls, "SLOW_S", 1.0)

    result, told = tuned(tmp_path, "HANG", Deadlines(first=5.0))

    assert [row.status for row in rows_of(result, "fast")] == [Status.OK]
    assert rows_of(result, "hangs")[0].reason == "no end after 5 s"
    first, replaced, *_ = told.incidents
    assert first.kind == "first_call"
    assert first.text.startswith("hangs of ")
    assert " on decode:n1:10, " in first.text
    assert first.text.endswith(" s so far; after 5 s it counts as hung")
    after = "hangs on decode:n1:10: no end after 5 s"
    assert replaced.text == f"the worker on cpu is replaced after {after}"
    assert workers() == []


def test_an_arm_that_fails_on_some_batches_keeps_its_other_rows(tmp_path: Path) -> None:
    result, _ = tuned(tmp_path, "SOMETIMES")

    statuses = [row.status for row in rows_of(result, "for many")]
    assert statuses == [Status.OK] * 2 + [Status.FAILED] * 3
    assert [arm.arm for arm in result.quarantined] == ["for many"]
    assert len(rows_of(result, "fast")) == 6


def test_a_worker_that_cannot_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    told = Remember()
    request = RunRequest(tmp_path / "t.db", device="cpu")

    with pytest.raises(MachineUnfit, match="ended before it touched an arm") as raised:
        run(request, told, registry="tests.autotune.fatal_import:POINTS")

    assert "exit code 7: no torch for you" in str(raised.value)
    assert workers() == []
    assert not request.database.exists()


_RUN = """
import sys
from pathlib import Path
from nsa_tune.autotune.runner.run import RunRequest, run
run(RunRequest(Path(sys.argv[1]), device="cpu"), registry="tests.autotune.faults:HANG")
"""


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_does_not_outlive_a_run_that_is_killed(tmp_path: Path, signal_: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(tmp_path / "t.db")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        worker = awaited(lambda: processes_of(parent.pid))[0]
        awaited(lambda: (tmp_path / "t.db").exists())
        parent.send_signal(signal_)

    awaited(lambda: not Path(f"/proc/{worker}").exists())


def test_a_new_worker_measures_the_ceilings_when_the_last_one_is_gone() -> None:
    """As when another device failed, and the last job of this one killed its worker."""
    setup = Setup("cpu", "tiny", None, "fp8", (), "tests.autotune.fake_point:TWO_ARMS")
    executor = IsolatedExecutor(setup, Deadlines())
    try:
        wait_until_ready(executor)
        executor.close()
        executor.begin_ceilings()
        update = awaited(executor.advance)
    finally:
        executor.close()

    assert update.finished
    assert update.replaced == ""
    assert {row.arm for row in update.rows} >= {"copy", "matmul_bf16"}


def awaited(look: Callable[[], T | None]) -> T:
    """What `look` returns as soon as it is true."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_runs_that_are_killed_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path)

    trial.kill(2)

    assert (trial.kills, trial.finished >= 1) == (2, True)
