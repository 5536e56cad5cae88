"""Real processes steer made-up engines through thousands of passes: they run alike, or not at all.

Each process runs the plug-in's hooks, its agreement over a TCP store, and gathers by gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.pass_mode.rank_processes import Fault, Scenario
from tests.engines.site import REPOSITORY

Run = Callable[[Scenario], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """It runs a scenario for each line that it is sent."""
    command = [sys.executable, "-m", "tests.engines.sglang.pass_mode.rank_processes"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        yield program
        assert program.stdin is not None
        program.stdin.close()


@pytest.fixture
def ran(program: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Runs a scenario: what each rank that lived reports."""

    def run(scenario: Scenario) -> list[dict[str, Any]]:
        assert program.stdin is not None
        assert program.stdout is not None
        (tmp_path / "scenario.json").write_text(json.dumps(asdict(scenario)))
        program.stdin.write(f"{tmp_path}\n")
        program.stdin.flush()
        assert program.stdout.readline() == "ended\n"
        said = (tmp_path / "stderr").read_text()
        assert (tmp_path / "codes").exists(), said
        killed = scenario.fault is Fault.KILLED
        codes = json.loads((tmp_path / "codes").read_text())
        assert sorted(codes) == [0] * (scenario.ranks - killed) + [9] * killed, said
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]

    return run


def _alike(reports: list[dict[str, Any]], scenario: Scenario) -> Counter[str]:
    """How often each way was taken, by all ranks in the same passes."""
    assert len(reports) == scenario.ranks
    first = reports[0]
    assert [one["mixed"] for one in reports] == [[]] * len(reports)
    assert all(one["log"] == first["log"] for one in reports)
    assert all(one["times"] == first["times"] for one in reports), "all go by rank 0's"
    return Counter(line.partition(" + ")[0] for line in first["log"])


def _late(reports: list[dict[str, Any]]) -> set[str]:
    """The ways of the last passes."""
    return {line.partition(" + ")[0] for line in reports[0]["log"][-200:]}


@pytest.mark.parametrize(
    ("ranks", "passes", "fault", "odd"),
    [
        # Rank 0's clock decides what is given up.
        (2, 2000, Fault.LOSES, 0), (2, 1500, Fault.LOSES, 1), (4, 1000, Fault.OTHER_TABLE, 1),
        (2, 300, Fault.NO_TABLE, 0),
    ],
)  # fmt: skip
def test_tensor_parallel_ranks_run_alike(
    ranks: int, passes: int, fault: Fault, odd: int, ran: Run
) -> None:
    scenario = Scenario(ranks, passes, fault=fault, odd=odd)
    reports = ran(scenario)
    ways = _alike(reports, scenario)

    assert {"engine", "decode_graph", "dense_graph", "eager"} <= ways.keys()
    given_up = fault is Fault.LOSES and odd == 0
    assert ("decode_graph" in _late(reports)) != given_up


@pytest.mark.parametrize("odd", [0, 1])
def test_hooks_that_fail_on_one_rank_later_leave_all_ways_alike(
    odd: int, ran: Run, tmp_path: Path
) -> None:
    reports = ran(Scenario(2, 1000, fault=Fault.HOOKS_FAIL, odd=odd))
    ways = _alike(reports, Scenario(2, 1000))

    assert {"engine", "decode_graph", "dense_graph", "eager"} <= ways.keys()
    assert {"decode_graph", "dense_graph"} <= _late(reports)
    assert all(reports[1 - odd]["swapped"])
    # From some pass on SGLang's kernel runs, and it stays.
    swapped = reports[odd]["swapped"]
    count = swapped.count(True)
    assert 0 < count < len(swapped)
    assert all(swapped[:count])
    log = (tmp_path / f"{odd}.log").read_text()
    for what in ("steering a prefill", "nsa-tune's kernel that copies"):
        assert log.count(f"{what} failed, so SGLang decides by itself: RuntimeError: made up") == 1


@pytest.mark.parametrize("odd", [0, 1])
def test_a_clock_that_fails_on_one_rank_later_leaves_all_ways_alike(
    odd: int, ran: Run, tmp_path: Path
) -> None:
    reports = ran(Scenario(2, 1000, fault=Fault.CLOCK_FAILS, odd=odd))
    ways = _alike(reports, Scenario(2, 1000))

    assert {"engine", "decode_graph", "dense_graph", "eager"} <= ways.keys()
    # Nobody would see what loses by rank 0's clock.
    assert (_late(reports) == {"engine"}) == (odd == 0)
    said = "timing passes failed, so SGLang decides by itself: RuntimeError: made up"
    assert (tmp_path / f"{odd}.log").read_text().count(said) == 1


def test_ranks_that_verify_drafts_run_alike(ran: Run) -> None:
    """The hidden states of all new tokens, which the draft layer reads, are compared too."""
    scenario = Scenario(2, 500, fault=Fault.OTHER_TABLE, width=2)
    reports = ran(scenario)
    ways = _alike(reports, scenario)

    assert {"decode_graph", "dense_graph"} <= ways.keys()


def test_ranks_time_as_many_passes_whatever_their_clocks_and_tables_say(ran: Run) -> None:
    scenario = Scenario(2, 100, fault=Fault.OTHER_CLOCK)
    reports = ran(scenario)
    _alike(reports, scenario)

    assert reports[0]["steers"]


@pytest.mark.parametrize(
    ("fault", "odd", "off", "why"),
    [
        (Fault.WRONG, 0, "dense_graph", "are allowed"),
        (Fault.WRONG, 1, "dense_graph", "wrong on another rank"),
        (Fault.SLOW, 1, "dense_graph", "nowhere more than 3% faster"),
        (Fault.WAY_FAILS, 1, "decode_graph", "it failed"),
    ],
)
def test_a_way_that_is_wrong_or_slow_on_one_rank_is_off_on_all(
    fault: Fault, odd: int, off: str, why: str, ran: Run
) -> None:
    scenario = Scenario(2, 500, fault=fault, odd=odd)
    reports = ran(scenario)
    ways = _alike(reports, scenario)

    assert off not in ways
    assert ways.keys() & {"decode_graph", "dense_graph"}
    # Rank 0 keeps what it has found; the others found the same, perhaps for another reason.
    assert why in reports[0]["verdicts"][off]
    assert all(report["verdicts"][off].startswith("off") for report in reports)


def test_graphs_that_one_rank_cannot_capture_run_on_none(ran: Run) -> None:
    scenario = Scenario(2, 500, fault=Fault.CANNOT_CAPTURE)
    reports = ran(scenario)
    ways = _alike(reports, scenario)

    assert "dense_graph" not in ways
    assert "decode_graph" in ways


@pytest.mark.parametrize("fault", [Fault.OTHER_KEY, Fault.NO_PLUGIN, Fault.ALL_FAIL])
def test_ranks_that_differ_leave_everything_to_the_engine(fault: Fault, ran: Run) -> None:
    scenario = Scenario(2, 200, fault=fault)
    reports = ran(scenario)
    ways = _alike(reports, scenario)

    assert set(ways) == {"off"}
    assert not any(one["steers"] or one["stopped"] for one in reports)


def test_a_rank_that_is_killed_keeps_nobody_waiting(ran: Run) -> None:
    reports = ran(Scenario(4, 0, fault=Fault.KILLED))

    assert [one["steers"] for one in reports] == [False] * 3


def test_a_rank_that_fails_while_others_wait_stops_the_engine_with_a_sentence(ran: Run) -> None:
    reports = ran(Scenario(2, 0, fault=Fault.CANNOT_MEASURE))

    assert not any(one["steers"] for one in reports)
    said = reports[1]["stopped"]
    assert "timing passes failed on rank 1" in said
    assert "made up: out of memory" in said
    assert "rank 0 still waits" in said
    assert "--mem-fraction-static" in said
