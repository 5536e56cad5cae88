"""Roofline ceilings, measured on the CPU, and as a part of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa_tune.autotune.bench import ceilings, devices
from nsa_tune.autotune.bench.ceilings import measure_ceilings
from nsa_tune.autotune.bench.timing import CpuTimer, SlowedDown
from nsa_tune.autotune.runner import sweep
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.runner.run import RunRequest, RunResult, run
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.records import Device, Measurement, Status

CPU = torch.device("cpu")
TWO_ARMS = "tests.autotune.fake_point:TWO_ARMS"


def measured(arch: str = "cpu") -> list[Measurement]:
    """The ceilings of a CPU that calls itself `arch`."""
    return measure_ceilings(arch, CPU, CpuTimer())


def test_ceilings_of_a_cpu() -> None:
    rows = measured()

    assert {row.status for row in rows} == {Status.OK}
    assert all(row.low_us and row.high_us and row.samples for row in rows)
    assert {row.arm for row in rows} == {"copy", "matmul_bf16"}


def test_a_product_that_the_device_lacks_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such\nmatrix unit")

    monkeypatch.setattr(torch, "_scaled_mm", refused)

    (failed,) = (row for row in measured("sm90") if row.arm == "matmul_fp8")

    assert failed.status is Status.FAILED
    assert failed.reason == "RuntimeError: no such matrix unit"


def test_ceilings_are_no_decision_point() -> None:
    assert ceilings.POINT not in POINTS


# --- as a part of a run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this CPU say that it is a GPU."""
    describe = devices.describe

    def described(device: torch.device) -> Device:
        return replace(describe(device), arch="sm90")

    monkeypatch.setattr(devices, "describe", described)
    # PyTorch multiplies fp8 on a CPU so slowly that these tests would take minutes.
    monkeypatch.setattr(ceilings, "_HAS_FP8", frozenset())


def tuned(tmp_path: Path, **wishes: object) -> RunResult:
    request = RunRequest(tmp_path / "t.db", device="cpu", isolate=False)
    return run(replace(request, **wishes), registry=TWO_ARMS)  # type: ignore[arg-type]


def roof_of(rows: Sequence[Measurement]) -> list[Measurement]:
    return [row for row in rows if row.point == ceilings.POINT]


@pytest.mark.usefixtures("gpu")
def test_a_run_measures_the_ceilings_of_a_gpu_once_for_each_key(tmp_path: Path) -> None:
    first, again = tuned(tmp_path), tuned(tmp_path)

    stored = roof_of(first.table.measurements)
    assert first.outcome == "done"
    assert {row.arm for row in stored if row.status is Status.OK} >= {"copy", "matmul_bf16"}
    assert (first.measured, again.measured, again.skipped) == (8 + len(stored), 0, 8)


@pytest.mark.usefixtures("gpu")
def test_a_fresh_run_measures_the_ceilings_again(tmp_path: Path) -> None:
    first, fresh = tuned(tmp_path), tuned(tmp_path, fresh=True)

    assert fresh.measured == first.measured


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("wishes", [{"points": ("runnable",)}, {"ceilings": False}])
def test_a_run_of_some_points_or_a_check_measures_no_ceilings(
    tmp_path: Path, wishes: dict[str, object]
) -> None:
    assert roof_of(tuned(tmp_path, **wishes).table.measurements) == []


def test_a_run_measures_no_ceilings_of_a_cpu(tmp_path: Path) -> None:
    assert roof_of(tuned(tmp_path).table.measurements) == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), SlowedDown()])
def test_ceilings_that_fail_are_recorded_and_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("nsa_tune.autotune.bench.timing.interleave", fails)
        failed = tuned(tmp_path)
    again = tuned(tmp_path)

    assert {row.status for row in roof_of(failed.table.measurements)} == {Status.FAILED}
    assert str(failure)[:20] in roof_of(failed.table.measurements)[0].reason
    assert failed.outcome == "done"
    assert failed.quarantined == again.quarantined == ()
    assert Status.OK in {row.status for row in roof_of(again.table.measurements)}


def test_a_worker_that_dies_of_the_ceilings_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "lacks_ceilings", lambda device, known: True)
    incidents: list[Incident] = []

    class Remember(Progress):
        def incident(self, incident: Incident) -> None:
            incidents.append(incident)

    result = run(
        RunRequest(tmp_path / "t.db", device="cpu"), Remember(),
        registry="tests.autotune.fatal_ceilings:POINTS",
    )  # fmt: skip

    assert roof_of(result.table.measurements) == []
    assert (result.outcome, result.measured, result.failed, result.replaced) == ("done", 8, 0, 1)
    assert [one.text for one in incidents if one.kind == "worker_replaced"] == [
        "the worker on cpu is replaced after measuring the ceilings: exit code 3: "
        "the copy engine is gone"
    ]
