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
