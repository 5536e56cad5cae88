"""A run: stores as it goes, continues where it stopped, and survives being killed."""

from __future__ import annotations

import signal
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import NoReturn

import pytest

from nsa_tune import (
    Batch,
    DeviceMissing,
    HeadsError,
    LibraryMissing,
    UnknownName,
    UsageError,
)
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.runner.progress import Progress, Stored
from nsa_tune.autotune.runner.run import RunRequest, RunResult
from nsa_tune.autotune.runner.run import run as isolated_run
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Arm, Setting
from nsa_tune.backend.types.records import Status
from tests.autotune.fake_point import TWO_ARMS
from tests.autotune.kills import started


@pytest.fixture
def request_(tmp_path: Path) -> RunRequest:
    """A run over a made-up point of 6 batches: 4 with two choices, 2 with one only."""
    return RunRequest(tmp_path / "t.db", device="cpu", points=("runnable",), isolate=False)


run = partial(isolated_run, registry="tests.autotune.fake_point:TWO_ARMS")


def cells(result: RunResult) -> set[tuple[str, str]]:
    return {(row.batch, row.arm) for row in result.table.measurements}


class Interrupts(Progress):
    """Ctrl-C after the second batch."""

    def batch(self, stored: Stored) -> None:
        if stored.done == 2:
            raise KeyboardInterrupt


def test_a_run_measures_every_batch_with_two_allowed_arms(request_: RunRequest) -> None:
    result = run(request_)

    assert result.outcome == "done"
    assert (result.measured, result.skipped, result.failed) == (8, 0, 0)
    assert len(cells(result)) == 8
    assert result.table.key.model == "tiny"
    assert result.table.key.protocol == "cpu-clock/1"
    assert {row.status for row in result.table.measurements} == {Status.OK}


def test_a_second_run_finds_nothing_to_do(request_: RunRequest) -> None:
    run(request_)
    again = run(request_)

    assert (again.measured, again.skipped, again.outcome) == (0, 8, "done")


def test_a_fresh_run_measures_again_and_keeps_the_older_rows(request_: RunRequest) -> None:
    first = run(request_)
    fresh = run(replace(request_, fresh=True))

    assert (fresh.measured, fresh.skipped) == (8, 0)
    assert cells(fresh) == cells(first)
    with sqlite3.connect(request_.database) as db:
        assert db.execute("select count(*) from measurements").fetchone() == (16,)


def test_an_interrupted_fresh_run_can_be_continued(request_: RunRequest) -> None:
    run(request_)
    stopped = run(replace(request_, fresh=True), Interrupts())
    rest = run(request_)

    assert (stopped.measured, stopped.skipped, stopped.outcome) == (4, 0, "interrupted")
    assert (rest.measured, rest.skipped, rest.outcome) == (4, 4, "done")
    assert (run(request_).measured, run(request_).skipped) == (0, 8)


def test_an_arm_that_ran_out_of_memory_is_tried_again_by_the_next_run(
    request_: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(case: object) -> NoReturn:
        raise MemoryError("no room")

    arm = replace(TWO_ARMS["runnable"].arms[1], name="big", build=no_room)
    point = replace(TWO_ARMS["runnable"], arms=(*TWO_ARMS["runnable"].arms, arm))
    one = replace(point, grid=lambda setting: [Batch.decode([10])])
    monkeypatch.setitem(TWO_ARMS, "runnable", one)

    first, second = run(request_), run(request_)

    assert (first.measured, first.failed) == (3, 1)
    assert (second.measured, second.skipped) == (1, 2)
    assert second.quarantined == ()


def test_a_budget_ends_the_run_after_the_batch_that_used_it_up(request_: RunRequest) -> None:
    short = run(replace(request_, budget_s=0.0))
    rest = run(request_)

    assert (short.measured, short.outcome) == (2, "budget")
    assert (rest.measured, rest.skipped, rest.outcome) == (6, 2, "done")


def test_an_interrupted_run_returns_what_it_measured(request_: RunRequest) -> None:
    stopped = run(request_, Interrupts())

    assert (stopped.measured, stopped.outcome) == (4, "interrupted")
    assert len(stopped.table.measurements) == 4
    assert run(request_).skipped == 4


def test_another_head_count_has_another_key(request_: RunRequest) -> None:
    run(request_)

    assert run(replace(request_, heads=2)).skipped == 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": "gpt-2"}, UnknownName, "unknown model 'gpt-2'; use one of: deepseek-v3.2"),
        ({"heads": 3}, HeadsError, "3 local heads do not divide the 4 heads of tiny"),
        ({"heads": 0}, HeadsError, "must be a positive whole number"),
        ({"kv_dtype": "int4"}, UnknownName, "unknown KV dtype 'int4'; use one of: bf16, fp8"),
        ({"points": ("prefil",)}, UnknownName, "unknown decision point 'prefil'"),
        ({"device": "tpu"}, UsageError, "unknown device 'tpu'; use auto, cpu, cuda, cuda:N or all"),
        ({"device": "cuda:x"}, UsageError, "unknown device 'cuda:x'"),
        ({"device": "cuda:99"}, DeviceMissing, "there is no GPU 'cuda:99'"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_stored(
    request_: RunRequest, change: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(replace(request_, **change))  # type: ignore[arg-type]
    assert not request_.database.exists()


def test_a_gpu_without_kernel_libraries_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsa_tune.backend.libraries.answering", lambda name: None)
    arms: list[Arm] = list(POINTS["prefill"].arms)

    with pytest.raises(LibraryMissing, match="pip install sgl-flash-mla; pip install flashinfer"):
        devices.check_libraries(arms)


def test_torch_arms_need_no_library() -> None:
    devices.check_libraries([arm for arm in POINTS["prefill"].arms if arm.reference])


CHILD = dedent(
    """
    import sys
    from pathlib import Path
    from nsa_tune.autotune.runner.run import Progress, RunRequest, run

    class Tell(Progress):
        def batch(self, stored):
            for row in stored.rows:
                print(row.batch, row.arm, flush=True)

    request = RunRequest(Path(sys.argv[1]), device="cpu", isolate=False)
    run(request, Tell(), registry="tests.autotune.fake_point:FORTY")
    """
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What a run that nobody kills has measured."""
    database = tmp_path_factory.mktemp("undisturbed") / "t.db"
    started(CHILD, database).communicate()
    with sqlite3.connect(database) as db:
        return db.execute("select batch, arm from measurements").fetchall()


@pytest.mark.parametrize("told", [1, 5])
def test_a_killed_run_loses_nothing_and_the_next_one_continues(
    tmp_path: Path, told: int, undisturbed: list[tuple[str, str]]
) -> None:
    database = tmp_path / "killed.db"
    with started(CHILD, database) as first:
        assert first.stdout is not None
        reported = [first.stdout.readline().split() for _ in range(told)]
        first.send_signal(signal.SIGKILL)
        # What was in the pipe before the kill was reported as well.
        reported += [line.split() for line in first.stdout.read().splitlines()]
    assert first.returncode == -signal.SIGKILL

    with sqlite3.connect(database) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
        stored = set(db.execute("select batch, arm from measurements"))
        (measured,) = db.execute("select count(distinct batch) from measurements").fetchone()
        assert db.execute("select unit, batches from units").fetchall() == [("cpu", measured)]
    assert {tuple(words) for words in reported} <= stored

    output, _ = started(CHILD, database).communicate()
    measured_again = {tuple(line.split()) for line in output.splitlines()}
    assert not measured_again & stored
    with sqlite3.connect(database) as db:
        rows = db.execute("select batch, arm from measurements").fetchall()
    assert len(rows) == len(undisturbed)
    assert set(rows) == set(undisturbed)


def test_a_cpu_measures_the_tiny_profile_by_default(request_: RunRequest) -> None:
    settings: list[Setting] = []

    class Remember(Progress):
        def start(self, setting: Setting, key: object, batches: int, skipped: int) -> None:
            settings.append(setting)

    run(replace(request_, budget_s=0.0), Remember())

    assert settings[0].profile.name == "tiny"
    assert settings[0].heads == 4
