"""Which launcher the options of `run` stand for."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import NsaTuneError
from nsa_tune._cli.measure.executors import ExecutorKind, ExecutorOptions, launcher_for
from nsa_tune.autotune.cluster.launcher import RayLauncher
from nsa_tune.autotune.runner.run import RunRequest
from nsa_tune.autotune.worker.isolated import Deadlines

REQUEST = RunRequest(Path("some.db"), device="cuda", deadlines=Deadlines(first=7.0))
RAY = ExecutorOptions(ExecutorKind.RAY, "head:6379", 3)


def test_this_host_needs_no_launcher() -> None:
    assert launcher_for(ExecutorOptions(), REQUEST) is None


def test_a_ray_cluster_gets_what_the_user_asked_for() -> None:
    assert launcher_for(RAY, REQUEST) == RayLauncher("head:6379", "cuda", 3, Deadlines(first=7.0))


@pytest.mark.parametrize(
    ("options", "isolate", "text"),
    [
        (ExecutorOptions(address="auto"), True, "--address is for a cluster: add --executor ray"),
        (ExecutorOptions(sample=2), True, "--sample is for a cluster: add --executor ray"),
        (RAY, False, "--no-isolate is for devices of this host"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: ExecutorOptions, isolate: bool, text: str
) -> None:
    with pytest.raises(NsaTuneError, match=text):
        launcher_for(options, replace(REQUEST, isolate=isolate))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(NsaTuneError, match=r"pip install '\.\[ray\]'"):
        launcher_for(RAY, REQUEST)
