"""Reloading: a new table takes over whole, or the old one goes on and the reason is said."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event

import pytest

from nsa_tune import Batch, Dispatcher, Plan
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import FAKE, SETTING, policy_of, table_of
from tests.backend.machine import SLOW_DENSE, TIMES, opened, written

_SHORT = Batch.extend([0], [64])


pytestmark = pytest.mark.usefixtures("machine")


def test_a_new_table_answers_after_a_reload_and_not_before(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    found = opened(path)
    old = found.plan(_SHORT)
    written(path, table_of(SLOW_DENSE))
    assert found.plan(_SHORT).prefill_path == "mha"

    assert found.reload() is None

    assert found.plan(_SHORT).prefill_path == "mla"
    assert old.reasons["prefill_path"].estimates_us["mha"] == pytest.approx(
        TIMES["mha/dense"](_SHORT)
    )


def test_what_was_decided_for_a_graph_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    found = opened(path)
    graph = found.captured(8)
    written(path, table_of(SLOW_DENSE))
    found.reload()

    assert found.captured(8) is graph


@pytest.mark.parametrize("text", ["", "nsa-tune", "no table at all"])
def test_a_table_that_cannot_be_used_leaves_the_old_one(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    found = opened(path)
    path.write_text(text)

    problem = found.reload()

    assert problem is not None
    assert str(path) in problem
    assert found.plan(_SHORT).prefill_path == "mha"
    assert found.table is not None


def test_a_wrong_variable_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = opened(written(tmp_path / "t.tsv", table_of(TIMES)))
    monkeypatch.setenv("NSA_TUNE_DISABLE", "perhaps")

    assert "NSA_TUNE_DISABLE is 'perhaps'" in (found.reload() or "")
    assert found.plan(_SHORT).prefill_path == "mha"


def test_a_dispatcher_made_of_policies_has_nothing_to_reload() -> None:
    made = Dispatcher(SETTING, [policy_of(TIMES)], source="made up")

    assert "was not opened" in (made.reload() or "")


def test_many_threads_plan_by_the_old_table_or_by_the_new_one(tmp_path: Path) -> None:
    random = Random(4)
    drawn = [FAKE.sample(SETTING, random) for _ in range(40)]
    batches = [*drawn, *(batch.sums for batch in drawn)]
    path, table = tmp_path / "t.tsv", {"old": table_of(TIMES), "new": table_of(SLOW_DENSE)}
    expected: dict[str, list[Plan]] = {
        name: [opened(written(path, one)).plan(batch) for batch in batches]
        for name, one in table.items()
    }
    shared, done = opened(written(path, table["old"])), Event()

    def plan(seed: int) -> int:
        order, seen = Random(seed), 0
        while not done.is_set() or seen < 200:
            i = order.randrange(len(batches))
            assert shared.plan(batches[i]) in (expected["old"][i], expected["new"][i])
            seen += 1
        return seen

    with ThreadPoolExecutor(17) as pool:
        planning = [pool.submit(plan, seed) for seed in range(16)]
        try:
            for i in range(12):
                _replace(path, table["new" if i % 2 == 0 else "old"])
                assert shared.reload() is None
        finally:
            done.set()
        assert sum(one.result() for one in planning) >= 16 * 200
    assert [shared.plan(batch) for batch in batches] == expected["old"]


def _replace(path: Path, table: object) -> None:
    """Write the file as the tools do: whole, and then in its place."""
    beside = path.with_name("next.tsv")
    beside.write_text(format_table(table))  # type: ignore[arg-type]
    os.replace(beside, path)  # noqa: PTH105
