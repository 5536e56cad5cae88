"""Ranks that do not do the same are found."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.configurations import Configuration
from benchmarks.engine.control import Control
from benchmarks.engine.probe import Settings
from benchmarks.engine.ranks import differences, summary_of, waves
from benchmarks.engine.session import Session


def _pass(graph: bool, mha: bool = False, q: int = 8) -> dict[str, Any]:
    return {"mode": "EXTEND", "graph": graph, "mha": mha, "impl": "fa3", "q": q}


def test_ranks_that_do_the_same_do_not_differ() -> None:
    passes = [_pass(True), _pass(False, mha=True)]
    assert list(differences({0: passes, 1: list(passes)}, alike=True)) == []


def test_a_graph_on_one_rank_alone_is_found() -> None:
    found = list(differences({0: [_pass(True)], 1: [_pass(False)]}, alike=False))
    assert [one["pass"] for one in found] == [0]
    assert found[0]["ranks"]["1"]["graph"] is False


def test_another_kernel_counts_only_where_ranks_share_their_batches() -> None:
    by_rank = {0: [_pass(False, mha=True)], 1: [_pass(False, q=9)]}
    assert list(differences(by_rank, alike=False)) == []
    assert len(list(differences(by_rank, alike=True))) == 1


def test_a_missing_pass_is_found() -> None:
    (found,) = differences({0: [_pass(True)], 1: []}, alike=True)
    assert found == {"passes": {"0": 1, "1": 0}}


@given(st.lists(st.booleans(), min_size=1), st.data())
def test_any_one_difference_is_found(graphs: list[bool], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(graphs) - 1))
    other = [graph is not (i == at) for i, graph in enumerate(graphs)]
    by_rank = {rank: [_pass(graph) for graph in found] for rank, found in ((0, graphs), (1, other))}
    assert [one["pass"] for one in differences(by_rank, alike=False)] == [at]


def test_another_way_is_found_although_each_replays_a_graph() -> None:
    own, other = _pass(True), _pass(True) | {"pass_mode": "decode_graph"}
    assert len(list(differences({0: [own], 1: [other]}, alike=False))) == 1


def test_data_parallel_ranks_may_have_passes_of_other_kinds() -> None:
    prefill = _pass(True) | {"mode": "EXTEND", "pass_mode": "decode_graph"}
    idle = {"mode": "IDLE", "graph": True, "mha": False, "impl": "", "pass_mode": "decode_graph"}
    assert list(differences({0: [prefill], 1: [idle]}, alike=False)) == []


class _TwoRanks:
    """Each pass is written down when the next one begins, by the second rank another pass later."""

    def __init__(self, control: Control, passes: Path) -> None:
        self._control, self._passes = control, passes
        self._waiting: dict[int, list[int]] = {0: [], 1: []}

    def generate(self, **_: Any) -> list[Any]:
        with self._passes.open("a") as file:
            for gpu, waiting in self._waiting.items():
                if len(waiting) > gpu:
                    line = {"gpu": gpu, "tag": waiting.pop(0)}
                    file.write(json.dumps(line) + "\n")
                waiting.append(self._control.read().tag)
        return []


def test_a_rank_that_writes_later_has_as_many_passes(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "control", tmp_path / "passes", (Configuration("default"),))
    control = Control.create(settings.control)
    engine = _TwoRanks(control, settings.passes)
    session = Session(engine, settings, control, deadline=time.monotonic(), capacity=0, gpus=2)

    for _ in range(3):
        tags = [session.tag() for _ in range(4) if not engine.generate()]
        found = session.collect(all_ranks=True)
        by_rank = [[one["tag"] for one in found if one["gpu"] == gpu] for gpu in (0, 1)]
        assert by_rank[0] == by_rank[1]
        assert set(by_rank[0]) <= set(range(tags[-1] + 1))


class _Session:
    def tokens(self, count: int) -> list[int]:
        return [7] * count


def test_waves_mix_what_an_engine_runs_in_different_ways() -> None:
    made: Any = _Session()
    found = [one for wave in islice(waves(made), 200) for one in wave]
    lengths = [len(one.prompt) for one in found]
    assert min(lengths) < 64 < 2048 < max(lengths)
    assert {one.new for one in found} >= {1, 4}
    assert len({one.after_s for one in found}) > 1


def test_the_summary_counts_ways_and_kinds() -> None:
    passes = [
        _pass(True) | {"mode": "EXTEND", "pass_mode": "dense_graph"},
        _pass(False, mha=True) | {"mode": "EXTEND"},
        _pass(True) | {"mode": "DECODE"},
    ]
    assert summary_of(passes) == {
        "passes": 3, "modes": {"EXTEND": 2, "DECODE": 1},
        "ways": {"dense_graph": 1, "engine": 2},
        "prefills": {"graph": 1, "eager": 1, "mha": 1},
    }  # fmt: skip
