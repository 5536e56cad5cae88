"""Tries: the outcomes of real processes that die, hang or return wrong numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_tune.autotune.probe.child import Target
from nsa_tune.autotune.probe.tries import Outcome, attempt
from tests.autotune import fake_limits
from tests.autotune.fake_limits import LIMIT

TARGET = Target("tiny", 4, "fp8", "cpu")


def fake(name: str) -> str:
    return f"{fake_limits.__name__}:{name}"


@pytest.mark.parametrize(
    ("trial", "outcome", "words"),
    [
        ("segfaults", Outcome.KILLED, "SIGSEGV"),
        ("abort", Outcome.KILLED, "SIGABRT"),
        ("exits", Outcome.EXITED, "exit code 1: CUDA error (file.cu:1): invalid argument"),
        ("leaves", Outcome.EXITED, "exit code 0: it wrote nothing"),
        ("raises", Outcome.EXITED, "smem_size <= smem_capacity"),
        ("wrong", Outcome.WRONG, "relative error 1"),
        ("nan", Outcome.WRONG, "no number"),
        ("memory", Outcome.MEMORY, "CUDA out of memory"),
    ],
)
def test_the_outcome_says_how_the_process_ended(trial: str, outcome: Outcome, words: str) -> None:
    assert attempt(fake(trial), LIMIT, TARGET, 60).outcome is Outcome.OK

    one = attempt(fake(trial), LIMIT + 1, TARGET, 60)
    assert one.outcome is outcome
    assert words in one.words


def test_memory_that_others_hold_is_no_error_of_the_kernel() -> None:
    assert attempt(fake("held"), 1, TARGET, 60).outcome is Outcome.MEMORY


def test_files_of_the_working_directory_are_no_modules_of_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that fails says where a kernel's limit is: a file called json.py is no limit."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not the one of Python')")
    monkeypatch.chdir(tmp_path)

    assert attempt(fake("raises"), LIMIT, TARGET, 60).outcome is Outcome.OK


def test_a_process_that_hangs_is_killed_at_its_deadline() -> None:
    one = attempt(fake("hangs"), LIMIT + 1, TARGET, 3)

    assert (one.outcome, one.words) == (Outcome.HUNG, "not done after 3 s")
