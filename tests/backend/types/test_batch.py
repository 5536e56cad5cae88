"""A batch's sums, what it refuses, and its one-word form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import BatchError
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.lengths import MAX_TOKENS

_SEQUENCES = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=9)


def test_an_extend_sums_over_its_sequences() -> None:
    batch = Batch.extend([0, 512], [300, 64])

    assert batch.mode is Mode.EXTEND
    assert (batch.batch_size, batch.q_tokens, batch.kv_tokens) == (2, 364, 876)
    assert (batch.prefix_tokens, batch.max_kv, batch.next_n) == (512, 576, 1)
    assert batch.pairs == 300 * 301 // 2 + 64 * 512 + 64 * 65 // 2


@given(_SEQUENCES)
@settings(max_examples=50)
def test_pairs_count_each_query_with_the_keys_up_to_itself(lens: list[tuple[int, int]]) -> None:
    batch = Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])

    one_by_one = sum(sum(range(prefix + 1, prefix + new + 1)) for prefix, new in lens)
    assert batch.pairs == one_by_one


def test_contexts_of_a_verify_count_its_new_tokens() -> None:
    batch = Batch.verify([8192] * 64, next_n=2)

    assert batch.mode is Mode.TARGET_VERIFY
    assert (batch.batch_size, batch.q_tokens, batch.kv_tokens) == (64, 128, 64 * 8192)
    assert batch.lens == ((8190, 2),) * 64


def test_decode_and_draft_extend_are_modes_of_their_own() -> None:
    assert Batch.decode([5]).mode is Mode.DECODE
    assert Batch.decode([5]).next_n == 1
    assert Batch.draft_extend([5], 3).mode is Mode.DRAFT_EXTEND
    assert Batch.draft_extend([5], 3).q_tokens == 3


@pytest.mark.parametrize(
    ("prefixes", "news", "clause"),
    [
        ([], [], "one prefix length and one new length"),
        ([0, 0], [1], "got 2 and 1"),
        ([-1], [1], "at least 0"),
        ([0], [0], "at least 1"),
        ([0.5], [1], "whole numbers"),
        (["7"], [1], "whole numbers"),
        ([MAX_TOKENS], [1], "int32"),
        ([10**30], [1], "int32"),
    ],
)
def test_impossible_lengths_are_refused(prefixes: Any, news: Any, clause: str) -> None:
    with pytest.raises(BatchError, match=clause):
        Batch.extend(prefixes, news)


@pytest.mark.parametrize(
    ("contexts", "next_n", "clause"),
    [
        ([8], 0, "next_n must be at least 1"),
        ([3, 1], 2, "1 is too short"),
        ([], 2, "got 0 and 0"),
        ([8], 1.5, "whole numbers"),
    ],
)
def test_impossible_verifies_are_refused(contexts: Any, next_n: Any, clause: str) -> None:
    with pytest.raises(BatchError, match=clause):
        Batch.verify(contexts, next_n)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 64))
@settings(max_examples=50)
def test_totals_of_equal_sequences_are_the_batch_itself(prefix: int, new: int, count: int) -> None:
    batch = Batch.extend([prefix] * count, [new] * count)

    totals = Batch.from_totals(
        mode="extend",
        batch_size=count,
        q_tokens=batch.q_tokens,
        kv_tokens=batch.kv_tokens,
        max_kv=batch.max_kv,
    )
    assert totals.pairs == batch.pairs
    assert (totals.q_tokens, totals.kv_tokens, totals.lens) == (
        batch.q_tokens,
        batch.kv_tokens,
        None,
    )


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"mode": "prefill"}, "unknown mode 'prefill'; use one of: extend, decode"),
        ({"q_tokens": 0}, "1 <= batch_size <= q_tokens"),
        ({"kv_tokens": 7}, "q_tokens <= kv_tokens"),
        ({"kv_tokens": 2**31}, "kv_tokens < 2"),
        ({"batch_size": 9}, "batch_size <= q_tokens"),
        ({"next_n": 0}, "next_n 0 contradicts 8 new tokens"),
        ({"next_n": 5}, "next_n 5 contradicts 8 new tokens in 1 sequence in mode extend"),
        ({"mode": "decode", "batch_size": 3, "max_kv": 90}, "contradicts 8 new tokens"),
        ({"q_tokens": 8.0}, "whole numbers"),
        ({"max_kv": None}, "whole numbers"),
        ({"batch_size": 8}, "max_kv 100 contradicts 100 kv tokens"),
        ({"max_kv": 9}, "max_kv 9 contradicts"),
        ({"max_kv": 101}, "max_kv 101 contradicts"),
        ({"pairs": 7}, "pairs 7 contradicts"),
        ({"pairs": 801}, "pairs 801 contradicts"),
    ],
)
def test_contradicting_totals_are_refused(change: dict[str, Any], clause: str) -> None:
    totals = {"mode": "extend", "q_tokens": 8, "kv_tokens": 100, "max_kv": 100}
    Batch.from_totals(**totals)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=clause):
        Batch.from_totals(**{**totals, **change})


def test_equal_neighbours_are_folded_in_the_word() -> None:
    assert str(Batch.extend([1920, 0, 0], [128, 300, 300])) == "extend:1920+128,0+300x2"
    assert str(Batch.verify([8192] * 64, 2)) == "target_verify:n2:8192x64"
    assert str(Batch.decode([7, 8])) == "decode:n1:7,8"


@given(_SEQUENCES)
@settings(max_examples=50)
def test_the_word_of_an_extend_reads_back(lens: list[tuple[int, int]]) -> None:
    batch = Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])

    assert Batch.parse(str(batch)) == batch


@given(st.lists(st.integers(8, 9000), min_size=1, max_size=9), st.integers(1, 8))
@settings(max_examples=50)
def test_the_word_of_a_verify_reads_back(contexts: list[int], next_n: int) -> None:
    for batch in (Batch.verify(contexts, next_n), Batch.draft_extend(contexts, next_n)):
        assert Batch.parse(str(batch)) == batch


@pytest.mark.parametrize(
    "text",
    [
        "",
        "extend",
        "extend:",
        "extend:5",
        "extend:5+0",
        "extend:n2:5+1",
        "decode:5",
        "decode:n1:0",
        "decode:n1:3+1",
        "prefill:0+1",
        "extend:0+1,",
        "extend:0+1x0",
        "extend:-1+1",
        "extend:0+1 ",
        "extend:q=8,kv=100,max=100,n=1",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(BatchError):
        Batch.parse(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("decode:300,129", r"decode:nNEXT_N:CONTEXT\[xCOUNT\].*such as decode:n1:300,129"),
        ("draft_extend:500", "such as draft_extend:n1:"),
        ("extend:n2:5+1", "write an extend as extend:PREFIX"),
        ("prefill:0+1", "decode:n1:CONTEXT"),
    ],
)
def test_the_error_shows_how_such_a_batch_is_written(text: str, form: str) -> None:
    with pytest.raises(BatchError, match=form):
        Batch.parse(text)


def test_next_n_of_sums_is_what_the_sums_say() -> None:
    verify = Batch.from_totals(
        mode="target_verify", batch_size=64, q_tokens=256, kv_tokens=64 * 8192, max_kv=8192
    )

    assert verify.next_n == 4


def test_sums_of_numpy_become_plain_integers() -> None:
    sums: dict[str, Any] = {"q_tokens": 1 << 20, "kv_tokens": 1_100_000, "max_kv": 1_100_000}
    narrow: dict[str, Any] = {name: np.int32(value) for name, value in sums.items()}
    batch = Batch.from_totals(mode="extend", **narrow)

    assert batch == Batch.from_totals(mode="extend", **sums)
    assert {type(getattr(batch, name)) for name in sums} == {int}


def test_a_written_batch_of_too_many_sequences_is_refused_at_once() -> None:
    with pytest.raises(BatchError, match="at most 262144 sequences"):
        Batch.parse("extend:1+1x999999,1+1x999999")
