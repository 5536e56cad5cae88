"""Real faults on a real GPU: ``pytest -m gpu``. Only the worker is lost, never the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa_tune.autotune.runner.run import RunRequest, RunResult, run
from nsa_tune.autotune.worker.isolated import Deadlines
from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.types.records import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT = Deadlines(first=30.0, sample=5.0)


def tuned(tmp_path: Path, faults: str) -> RunResult:
    request = RunRequest(
        tmp_path / "t.db", device="cuda", model="deepseek-v3.2", deadlines=SHORT
    )  # fmt: skip
    return run(request, registry=f"tests.gpu.faults:{faults}")


def reasons(result: RunResult, arm: str) -> list[str]:
    return [row.reason for row in result.table.measurements if row.arm == arm]


def all_right(result: RunResult, arm: str, count: int) -> bool:
    statuses = [row.status for row in result.table.measurements if row.arm == arm]
    return statuses == [Status.OK] * count


def nothing_is_left() -> bool:
    state = nvml.gpu_state(0)
    return state is None or not state.processes


def test_an_illegal_access_and_an_assertion_cost_a_worker_each(tmp_path: Path) -> None:
    result = tuned(tmp_path, "STRAYS")

    assert result.outcome == "done"
    assert all_right(result, "fine", 4)
    assert all_right(result, "also fine", 4)
    assert len(reasons(result, "strays")) == len(reasons(result, "asserts")) == 3
    assert "illegal memory access" in reasons(result, "strays")[0]
    assert "assert" in reasons(result, "asserts")[0]
    assert {arm.arm for arm in result.quarantined} == {"strays", "asserts"}
    assert nothing_is_left()


def test_a_kernel_that_never_ends_is_ended(tmp_path: Path) -> None:
    result = tuned(tmp_path, "HANGS")

    assert result.outcome == "done"
    assert all_right(result, "fine", 2)
    assert reasons(result, "hangs") == ["no end after 30 s"] * 2
    assert nothing_is_left()


def test_faults_that_show_in_a_graphs_replay_are_blamed_on_their_arm(tmp_path: Path) -> None:
    result = tuned(tmp_path, "LATE")

    assert all_right(result, "fine", 1)
    assert all_right(result, "also fine", 1)
    assert "illegal memory access" in reasons(result, "strays")[0]
    assert reasons(result, "hangs") == ["no end after 5 s"]


def test_an_arm_that_needs_too_much_memory_fails_and_stays(tmp_path: Path) -> None:
    result = tuned(tmp_path, "MEMORY")

    assert all_right(result, "fine", 2)
    assert all("OutOfMemoryError" in reason for reason in reasons(result, "too big"))
    assert (result.replaced, result.quarantined) == (0, ())
