"""Reloading: a new table takes over whole, or the old one goes on and the reason is said."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event

import pytest

from nsa_tune import Batch, Dispatcher, Plan
from nsa_tune.db.exchange import import_text
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table
from tests import records
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
        while not done.is_set() or seen < 100:
            i = order.randrange(len(batches))
            assert shared.plan(batches[i]) in (expected["old"][i], expected["new"][i])
            seen += 1
        return seen

    with ThreadPoolExecutor(9) as pool:
        planning = [pool.submit(plan, seed) for seed in range(8)]
        try:
            for i in range(8):
                _replace(path, table["new" if i % 2 == 0 else "old"])
                assert shared.reload() is None
        finally:
            done.set()
        assert sum(one.result() for one in planning) >= 8 * 100
    assert [shared.plan(batch) for batch in batches] == expected["old"]


def _replace(path: Path, table: object) -> None:
    """Write the file as the tools do: whole, and then in its place."""
    beside = path.with_name("next.tsv")
    beside.write_text(format_table(table))  # type: ignore[arg-type]
    os.replace(beside, path)  # noqa: PTH105


_FORKS = """
import os, sys, threading, time
from pathlib import Path
from nsa_tune import Dispatcher

dispatcher = Dispatcher.open(Path(sys.argv[1]), "NVIDIA H100 80GB HBM3", model="deepseek-v3.2",
                             heads=128, kv_dtype="fp8")

def reload_without_end():
    while True:
        dispatcher.reload()

for _ in range(3):
    threading.Thread(target=reload_without_end, daemon=True).start()
time.sleep(0.1)
stuck = 0
for _ in range(14):
    child = os.fork()
    if child == 0:
        dispatcher.reload()
        os._exit(0)
    end = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            stuck += 1
            break
        time.sleep(0.005)
print(f"{stuck} of 14 children are stuck", flush=True)
os._exit(stuck > 0)
"""


@pytest.mark.parametrize("kept_in", ["text", "database"])
def test_a_child_reloads_after_a_fork(kept_in: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(format_table(records.table(records.ok("extend:0+1"))))
    if kept_in == "database":
        with Store.open(tmp_path / "a.db") as store:
            import_text(store, path)
        path = tmp_path / "a.db"

    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(path)], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip

    assert "0 of 14 children are stuck" in done.stdout, done.stderr[-2000:]
