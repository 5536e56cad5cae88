"""Engines of deployments.toml, side by side on the GPUs of a host."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.engine import deployments, run
from benchmarks.engine.deployments import Deployment, arguments, read, run_all


@pytest.mark.parametrize("deployment", read(), ids=lambda deployment: deployment.name)
def test_every_deployment_is_a_run_of_the_harness(deployment: Deployment, tmp_path: Path) -> None:
    options = run._parsed(arguments(deployment, tmp_path, 30000, 100.0))
    assert options.real_tp == deployment.gpus
    assert "{" not in deployment.run.replace("{tree}", "")
    assert options.batches is None or options.batches.exists()
    assert options.seconds == 100.0


def _stub(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let `code` run in place of the harness, with its options in sys.argv."""
    stub = partial(deployments.started, command=(sys.executable, "-c", code))
    monkeypatch.setattr(deployments, "started", stub)


def test_engines_share_the_gpus_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _stub(monkeypatch, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    wanted = [
        Deployment("two", "", 90, gpus=2),
        Deployment("one", "", 90),
        Deployment("six", "", 90, 6),
    ]
    assert run_all(wanted, tmp_path, ["0", "1", "2"], 90) == 1  # six GPUs are not there
    assert (tmp_path / "two/log").read_text() == "0,1\n"
    assert (tmp_path / "one/log").read_text() == "2\n"
    assert (tmp_path / "one/tree/nsa_tune/tables").is_dir()


def test_an_engine_is_ended_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deployments, "_LEAST_S", 0.0)
    _stub(
        monkeypatch,
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); child.wait()",
    )
    assert run_all([Deployment("hangs", "", 3)], tmp_path, ["0"], 60) == 1
    child = int((tmp_path / "hangs/log").read_text())
    for _ in range(100):  # until whoever inherits it has seen its end
        if (
            not Path(f"/proc/{child}/stat").exists()
            or " Z " in Path(f"/proc/{child}/stat").read_text()
        ):
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("a process of the engine outlived it")


def test_a_name_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deployments.main(["out", "tp3"])
    assert "no deployment tp3; there are tp2_ranks" in capsys.readouterr().err
