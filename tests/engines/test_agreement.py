"""Ranks that compare their answers through PyTorch's own stores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, TCPStore

from nsa_tune.engines import agreement
from nsa_tune.engines.agreement import agree, decides_by, table_digest
from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang.pass_mode import ranks as module
from nsa_tune.engines.sglang.pass_mode.ranks import Ranks
from tests.engines.sglang.tables import dispatcher

_names = count()


@pytest.fixture(scope="module", params=["tcp", "hash"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "hash":
        return HashStore()
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def _verdicts(
    store: Any,
    answers: Sequence[str | None],
    *,
    delays_s: Sequence[float] | None = None,
    timeout_s: float = 60.0,
    question: str = "",
) -> list[bool]:
    """What each rank is told; one without an answer never asks."""
    question = question or f"question {next(_names)}"

    def ask(rank: int) -> bool:
        if delays_s is not None:
            time.sleep(delays_s[rank])
        answer = answers[rank]
        assert answer is not None
        return agree(store, question, answer, rank=rank, ranks=len(answers), timeout_s=timeout_s)

    asking = [rank for rank, answer in enumerate(answers) if answer is not None]
    with ThreadPoolExecutor(len(answers)) as pool:
        return list(pool.map(ask, asking))


def test_all_alike_are_on(store: Any) -> None:
    assert _verdicts(store, ["same"] * 4) == [True] * 4


def test_one_that_differs_turns_all_off(store: Any) -> None:
    for odd in range(4):
        answers = ["same"] * 4
        answers[odd] = "other"
        assert _verdicts(store, answers) == [False] * 4


def test_one_that_is_missing_turns_all_off(store: Any) -> None:
    assert _verdicts(store, ["same", None, "same"], timeout_s=0.2) == [False] * 2


def test_one_that_is_late_reads_that_it_is_off(store: Any) -> None:
    early = _verdicts(store, ["same", "same", None], timeout_s=0.2, question="late")
    late = agree(store, "late", "same", rank=2, ranks=3)

    assert (early, late) == ([False] * 2, False)


def test_one_that_is_late_in_time_does_not_matter(store: Any) -> None:
    assert _verdicts(store, ["same"] * 3, delays_s=[0, 0.2, 0.1]) == [True] * 3


def test_questions_do_not_mix(store: Any) -> None:
    assert _verdicts(store, ["same", "other"]) == [False] * 2
    assert _verdicts(store, ["same", "same"]) == [True] * 2


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.15)), min_size=2, max_size=4),
    st.floats(0.01, 0.15),
)
def test_all_ranks_are_told_the_same_whoever_comes_when(
    ranks: list[tuple[str, float]], timeout_s: float
) -> None:
    answers = [answer for answer, _ in ranks]
    told = _verdicts(
        HashStore(), answers, delays_s=[delay for _, delay in ranks], timeout_s=timeout_s
    )

    assert len(set(told)) == 1
    if len(set(answers)) > 1:
        assert told[0] is False


class _Group:
    """A tensor-parallel group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank_in_group = rank
        self.world_size = world_size
        self.sent: list[Any] = []

    def broadcast_object(self, obj: Any, src: int) -> Any:
        self.sent.append((obj, src))
        return "rank 0's"


def _ranks(rank: int, world_size: int) -> tuple[Ranks, _Group]:
    group = _Group(rank, world_size)
    return Ranks(type("Runner", (), {"tp_group": group})()), group


def test_one_rank_asks_nobody() -> None:
    ranks, group = _ranks(0, 1)

    assert ranks.agree("anything", "yes")
    assert ranks.from_first("mine") == "mine"
    assert group.sent == []


@pytest.mark.parametrize("absent", [False, True], ids=["both are there", "one has no plug-in"])
def test_a_rank_that_leaves_all_to_the_engine_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    shared = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    monkeypatch.setattr(module, "_asked", type(module._asked)())
    # Were anybody waited for, this test would not end.
    monkeypatch.setenv("NSA_TUNE_AGREE_S", "1e9")

    assert not _ranks(0, 2)[0].agree("mode", None)
    module._asked.clear()  # as the other rank's process counts
    if not absent:
        assert not _ranks(1, 2)[0].agree("mode", "yes")


def test_a_rank_without_the_plugin_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    monkeypatch.setattr(module, "_asked", type(module._asked)())
    monkeypatch.setattr(module, "_unanswered", [])
    ranks, _ = _ranks(0, 2)

    for timeout_s in ("0.01", "1e9"):
        monkeypatch.setenv("NSA_TUNE_AGREE_S", timeout_s)
        assert not ranks.agree("table", "yes")


def test_others_send_nothing_of_their_own() -> None:
    first, second = _ranks(0, 2), _ranks(1, 2)

    assert [first[0].from_first("mine"), second[0].from_first("mine")] == ["rank 0's"] * 2
    assert (first[1].sent, second[1].sent) == ([("mine", 0)], [(None, 0)])


def test_the_group_is_found_where_later_releases_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context = type("Context", (), {"tp_group": _Group(3, 4)})
    monkeypatch.setattr(module, "parallel", context)

    ranks = Ranks(object())

    assert (ranks.rank, ranks.count) == (3, 4)


def test_a_question_that_is_asked_again_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that captures its graphs anew must not read the verdict of the first time."""
    asked: list[str] = []

    def note(store: object, question: str, answer: str, **rest: object) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr(module, "agree", note)
    monkeypatch.setattr(module, "_asked", type(module._asked)())
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d._get_default_store", lambda: HashStore()
    )
    ranks, _ = _ranks(0, 2)
    for question in ("dense", "mode", "dense"):
        assert ranks.agree(question, "yes")

    assert asked == ["0/dense/1", "0/mode/1", "0/dense/2"]


def test_the_digest_is_of_the_rows() -> None:
    same = table_digest(dispatcher("fp8"))
    other = table_digest(dispatcher("fp8", sparse_us=3.0))

    assert same == table_digest(dispatcher("fp8"))
    assert same != other
    assert len(same) == 32


def test_all_that_answers_follow_from_is_compared() -> None:
    table = dispatcher("fp8")

    assert decides_by(table) == decides_by(table)
    assert decides_by(table) != decides_by(table, "more")
    assert decides_by(table) != decides_by(dispatcher("fp8", mha_us=1.0))


_ROOT = Path(__file__).parents[2]
_ANOTHER_PROCESS = """
from dataclasses import replace
from types import SimpleNamespace
from nsa_tune.engines.agreement import decides_by
from tests.engines.sglang.tables import dispatcher
found = dispatcher("fp8")
elsewhere = frozenset(f"flash_mla_{number}" for number in range(9))
setting = replace(found.setting, limits_elsewhere=elsewhere)
print(decides_by(SimpleNamespace(table=found.table, setting=setting, forced={})))
"""


def test_ranks_decide_by_the_same_whatever_their_hash_seeds() -> None:
    """Limits that were probed with other versions of the libraries are a set of names."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _ANOTHER_PROCESS], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


def test_another_nsa_tune_decides_by_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may weigh the same times in another way."""
    table = dispatcher("fp8")
    here = decides_by(table)
    monkeypatch.setattr(agreement, "__version__", "0")

    assert decides_by(table) != here


def _together(
    monkeypatch: pytest.MonkeyPatch, calls: Sequence[Any], timeout_s: float = 60.0
) -> list[Any]:
    """What each rank comes back with from the same step: its result, or what it raised."""
    shared = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    monkeypatch.setattr(module, "_numbered", lambda question: question)
    monkeypatch.setenv("NSA_TUNE_AGREE_S", str(timeout_s))

    def rank(number: int) -> Any:
        try:
            return _ranks(number, len(calls))[0].together("a step", calls[number])
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(rank, range(len(calls))))


def _fails() -> None:
    raise RuntimeError("made up")


def test_a_step_that_works_everywhere_gives_each_rank_its_own_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _together(monkeypatch, [lambda: "zero", lambda: "one"]) == ["zero", "one"]


def test_a_step_that_fails_on_one_rank_is_given_up_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = _together(monkeypatch, [lambda: "zero", _fails, lambda: "two"])

    assert first is third is None
    assert isinstance(second, RuntimeError)


def test_a_step_that_fails_everywhere_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _together(monkeypatch, [_fails, _fails])

    assert [type(one) for one in found] == [RuntimeError] * 2


def test_a_rank_that_fails_while_another_waits_for_it_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other is within a collective operation, and comes back with nothing."""
    shared = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    monkeypatch.setenv("NSA_TUNE_AGREE_S", "0.2")
    with pytest.raises(EngineMustStop, match=r"a step failed on rank 1 .*made up.* rank 0, 2"):
        _ranks(1, 3)[0].together("a step", _fails)


def test_one_rank_raises_what_its_step_raises() -> None:
    ranks, _ = _ranks(0, 1)

    assert ranks.together("a step", lambda: 3) == 3
    with pytest.raises(RuntimeError, match="made up"):
        ranks.together("a step", _fails)
