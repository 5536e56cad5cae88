"""A few cases of every target of `make fuzz`, and what counts as a finding."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.workload import weighted_batches
from tests import fuzz


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Fuzzing takes the process's alarm, and quiet."""
    before, passes = signal.getsignal(signal.SIGPROF), weighted_batches._MOST_PASSES
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    signal.signal(signal.SIGPROF, before)
    weighted_batches._MOST_PASSES = passes


def test_a_few_cases_of_each_target_find_nothing() -> None:
    counts, findings = fuzz.fuzz([*fuzz.TARGETS, "http"], seed=99, seconds=120, most=6)

    assert not findings, findings[0]
    assert all(found.total() == 6 for found in counts.values())


def test_good_files_are_used(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(fuzz._good_text(0))

    assert fuzz._use(path, 0, Random(1))
    path = tmp_path / "a.db"
    path.write_bytes(fuzz._good_database())
    assert fuzz._use(path, 1, Random(1))


def test_an_exception_that_is_not_ours_is_a_finding() -> None:
    def refused(random: Random, folder: Path) -> bool:
        raise NsaTuneError("one sentence")

    def found(random: Random, folder: Path) -> bool:
        raise ZeroDivisionError("made up")

    def endless(random: Random, folder: Path) -> bool:
        while True:
            pass

    signal.signal(signal.SIGPROF, fuzz._on_alarm)
    assert fuzz._tried(refused, "1") == "refused"
    assert "ZeroDivisionError: made up" in fuzz._tried(found, "1")
    fuzz._CASE_S, before = 0, fuzz._CASE_S
    try:
        assert "_TooLong" in fuzz._tried(_soon(endless), "1")
    finally:
        fuzz._CASE_S = before


def _soon(case: fuzz.Case) -> fuzz.Case:
    def with_an_alarm(random: Random, folder: Path) -> bool:
        signal.setitimer(signal.ITIMER_PROF, 0.05)
        return case(random, folder)

    return with_an_alarm
