"""Doctor: each check on a fake machine, and the conclusion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_tune.autotune.health import doctor
from nsa_tune.autotune.health.doctor import Diagnosis, Finding, State, examine
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.hardware.nvml import GpuState
from nsa_tune.backend.libraries import Answering
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.store import Store
from tests.reports.synthetic import real_table

CALM = GpuState(1980, 1980, 2619, 41, (), False, ())


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.65.06")
    _state(monkeypatch, CALM)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", list)


def _state(monkeypatch: pytest.MonkeyPatch, state: GpuState | None) -> None:
    monkeypatch.setattr(nvml, "gpu_state", lambda ordinal: state)


def _found(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_named_with_its_driver() -> None:
    found = _found(doctor.gpus())

    assert found["GPU 0"].text == "NVIDIA H100 80GB HBM3"
    assert found["driver"].text == "580.65.06"


def test_an_unknown_gpu_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA X1"])

    assert _found(doctor.gpus())["GPU 0"].state is State.NOTE


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cpu_is_named() -> None:
    found = _found(doctor.gpus())

    assert found["GPU"].state is State.NOTE
    assert "CPU" in found["GPU"].text


@pytest.mark.parametrize(("gpus", "state"), [([], State.NOTE), (["NVIDIA H200"], State.WARN)])
def test_an_absent_library_matters_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], state: State
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: gpus)
    monkeypatch.setattr(providers, "answering", lambda name: None)

    finding = _found(doctor.kernel_libraries())["flash_mla"]

    assert finding.state is state
    assert "pip install sgl-flash-mla" in finding.text


@pytest.mark.usefixtures("one_gpu")
def test_an_optional_library_is_a_note_even_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "answering", lambda name: None)

    finding = _found(doctor.kernel_libraries())["sglang_triton"]

    assert finding.state is State.NOTE
    assert finding.text == "optional, not installed: pip install 'sglang>=0.5.22'"


def test_the_distribution_of_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answering("sglang-kernel", "0.4.1", "sgl_kernel.flash_mla")
    monkeypatch.setattr(providers, "answering", lambda name: answer)

    found = _found(doctor.kernel_libraries())

    assert found["flash_mla"] == Finding(
        "flash_mla", State.OK, "sglang-kernel 0.4.1, as sgl_kernel.flash_mla"
    )


def test_missing_torch_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    finding = _found(doctor.torch_build())["torch"]

    assert finding.state is State.FAIL
    assert "pip install '.[tune]'" in finding.text


@pytest.mark.usefixtures("one_gpu")
def test_a_torch_that_cannot_use_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert _found(doctor.torch_build())["torch"].state is State.FAIL


@pytest.mark.usefixtures("one_gpu")
def test_clocks_are_reported() -> None:
    finding = _found(doctor.clocks())["clocks 0"]

    assert finding.state is State.OK
    assert "1980 of 1980 MHz" in finding.text
    assert "nothing slows it down" in finding.text


@pytest.mark.usefixtures("one_gpu")
def test_a_slowdown_is_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _state(monkeypatch, GpuState(900, 1980, 2619, 90, ("hardware thermal slowdown",), True, ()))

    finding = _found(doctor.clocks())["clocks 0"]

    assert finding.state is State.WARN
    assert "hardware thermal slowdown" in finding.text


@pytest.mark.usefixtures("one_gpu")
def test_a_driver_that_does_not_answer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    _state(monkeypatch, None)

    assert _found(doctor.clocks())["clocks 0"].state is State.NOTE


@pytest.mark.usefixtures("one_gpu")
def test_other_processes_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _state(monkeypatch, GpuState(1980, 1980, 2619, 41, (), False, (4242,)))

    finding = _found(doctor.other_processes())["processes 0"]

    assert finding.state is State.WARN
    assert "4242" in finding.text


def test_a_database_that_is_not_there_yet_is_noted(tmp_path: Path) -> None:
    finding = _found(doctor.databases(tmp_path / "none.db"))["database"]

    assert finding.state is State.NOTE


def test_a_damaged_database_fails(tmp_path: Path) -> None:
    path = tmp_path / "bad.db"
    path.write_text("no database at all")

    finding = _found(doctor.databases(path))["database"]

    assert finding.state is State.FAIL
    assert str(path) in finding.text


def test_a_database_is_counted(tmp_path: Path) -> None:
    path, text = tmp_path / "good.db", tmp_path / "table.tsv"
    table = real_table(points=("indexer_layout",))
    write_text(table, text)
    with Store.open(path) as store:
        import_text(store, text)

    finding = _found(doctor.databases(path))["database"]

    assert finding.state is State.OK
    assert f"1 table, {len(table.measurements)} measurements" in finding.text


@pytest.mark.parametrize(
    ("states", "fit", "start"),
    [
        ((State.OK, State.NOTE), True, "OK: this machine is ready"),
        ((State.OK, State.WARN), True, "This machine can measure, but look at this first: one."),
        ((State.WARN, State.FAIL), False, "This machine cannot measure: one."),
        ((State.FAIL, State.FAIL), False, "This machine cannot measure: one."),
    ],
)
def test_the_conclusion_is_the_worst_finding(
    states: tuple[State, ...], fit: bool, start: str
) -> None:
    diagnosis = Diagnosis(tuple(Finding("one", state, "text") for state in states))

    assert diagnosis.fit is fit
    assert diagnosis.conclusion.startswith(start)


@pytest.mark.usefixtures("no_gpu")
def test_a_whole_examination_ends_with_one_line(tmp_path: Path) -> None:
    diagnosis = examine(tmp_path / "none.db")

    assert isinstance(diagnosis, Diagnosis)
    subjects = [finding.subject for finding in diagnosis.findings]
    assert {"GPU", "torch", "flash_mla", "deep_gemm", "charts", "database"} <= set(subjects)
    assert "\n" not in diagnosis.conclusion
