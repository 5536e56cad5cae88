"""The ranks of one engine of SGLang's: what they agree on, and what they do together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang import ranks as module
from nsa_tune.engines.sglang.ranks import Ranks


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that all ranks of a test share, none of whom has asked anything yet."""
    shared = HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: shared)
    monkeypatch.setattr(module, "_asked", type(module._asked)())


class _Group:
    """A tensor-parallel group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank_in_group = rank
        self.world_size = world_size
        self.sent: list[Any] = []

    def broadcast_object(self, obj: Any, src: int) -> Any:
        self.sent.append((obj, src))
        return "rank 0's"

    def all_gather_object(self, obj: float) -> list[float]:
        return [obj, 7.0, 3.0]


def _ranks(rank: int, world_size: int) -> tuple[Ranks, _Group]:
    group = _Group(rank, world_size)
    return Ranks(type("Runner", (), {"tp_group": group})()), group


def test_one_rank_asks_nobody() -> None:
    ranks, group = _ranks(0, 1)

    assert ranks.agree("anything", "yes")
    assert ranks.from_first("mine") == "mine"
    assert ranks.longest(5.0) == 5.0
    assert group.sent == []


@pytest.mark.parametrize("absent", [False, True], ids=["both are there", "one has no plug-in"])
def test_a_rank_that_leaves_all_to_the_engine_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    # Were anybody waited for, this test would not end.
    monkeypatch.setenv("NSA_TUNE_AGREE_S", "1e9")

    assert not _ranks(0, 2)[0].agree("mode", None)
    module._asked.clear()  # as the other rank's process counts
    if not absent:
        assert not _ranks(1, 2)[0].agree("mode", "yes")


def test_a_rank_without_the_plugin_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_unanswered", [])
    ranks, _ = _ranks(0, 2)

    for timeout_s in ("0.01", "1e9"):
        monkeypatch.setenv("NSA_TUNE_AGREE_S", timeout_s)
        assert not ranks.agree("table", "yes")


def test_others_send_nothing_of_their_own() -> None:
    first, second = _ranks(0, 2), _ranks(1, 2)

    assert [first[0].from_first("mine"), second[0].from_first("mine")] == ["rank 0's"] * 2
    assert [first[0].longest(5.0), second[0].longest(9.0)] == [7.0, 9.0]
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
    ranks, _ = _ranks(0, 2)
    for question in ("dense", "mode", "dense"):
        assert ranks.agree(question, "yes")

    assert asked == ["0/dense/1", "0/mode/1", "0/dense/2"]


def _together(
    monkeypatch: pytest.MonkeyPatch, calls: Sequence[Any], timeout_s: float = 60.0
) -> list[Any]:
    """What each rank comes back with from the same step: its result, or what it raised."""
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
    monkeypatch.setenv("NSA_TUNE_AGREE_S", "0.2")
    with pytest.raises(EngineMustStop, match=r"a step failed on rank 1 .*made up.* rank 0, 2"):
        _ranks(1, 3)[0].together("a step", _fails)


def test_one_rank_raises_what_its_step_raises() -> None:
    ranks, _ = _ranks(0, 1)

    assert ranks.together("a step", lambda: 3) == 3
    with pytest.raises(RuntimeError, match="made up"):
        ranks.together("a step", _fails)
