"""Ranks compare what they decide by, and none waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from nsa_tune.backend.engines.agreement import Exchange, decides_by, table_digest
from tests.backend.engines.sglang.tables import dispatcher

SECONDS = 10.0


def _ranks(texts: list[str], *, silent: int = 0, seconds: float = SECONDS) -> list[str | None]:
    """What each rank hears; `silent` more ranks say nothing."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    count = len(texts) + silent

    def rank(number: int) -> str | None:
        return Exchange(store, number, count, seconds=seconds).differing(texts[number])

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(rank, range(len(texts))))


def test_ranks_that_are_alike_agree() -> None:
    assert _ranks(["a"] * 4) == [None] * 4


def test_every_rank_hears_of_one_that_differs() -> None:
    found = _ranks(["a", "a", "b", "a"])

    assert "rank 0 says a, rank 2 b" in str(found[0])
    assert all(found)


def test_a_rank_that_says_nothing_ends_it_in_time() -> None:
    found = _ranks(["a"] * 2, silent=1, seconds=0.3)

    assert all("not every rank has answered" in str(one) for one in found)


def test_a_rank_that_came_too_late_takes_the_others_with_it() -> None:
    """Rank 0 has heard everybody, rank 1 has not: both must give up."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    class Deaf:
        set, get = store.set, store.get

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            if "digest" in keys[0]:
                raise RuntimeError("timed out")
            store.wait(keys, timeout)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(Exchange(store, 0, 2, seconds=SECONDS).differing, "a")
        two = pool.submit(Exchange(Deaf(), 1, 2, seconds=SECONDS).differing, "a")

    assert one.result() == "another rank has found a difference"
    assert "not every rank has answered" in str(two.result())


def test_it_may_be_asked_again() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    exchanges = [Exchange(store, rank, 2, seconds=SECONDS) for rank in range(2)]

    def all_say(*texts: str) -> list[str | None]:
        with ThreadPoolExecutor(2) as pool:
            return [
                one.result()
                for one in [
                    pool.submit(exchange.differing, text)
                    for exchange, text in zip(exchanges, texts, strict=True)
                ]
            ]

    assert all_say("a", "a") == [None, None]
    assert all(all_say("a", "b"))
    assert all_say("c", "c") == [None, None]


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
