"""Junk in place of a batch's lengths and sums is a BatchError, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError, Dispatcher

_HUGE = 10**5000
_SCALARS: Any = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary()
    | st.sampled_from([_HUGE, -_HUGE, 2**31, 2**70, object(), "\ud800"])
)  # fmt: skip
_JUNK: Any = _SCALARS | st.lists(_SCALARS, max_size=3) | st.dictionaries(st.text(), _SCALARS)


@example([0.0, _HUGE], None, None, None)
@given(_JUNK, _JUNK, _JUNK, _JUNK)
def test_any_junk_is_a_batch_error(one: Any, two: Any, three: Any, four: Any) -> None:
    for make in (Batch.extend, Batch.verify, Batch.draft_extend):
        with suppress(BatchError):
            make(one, two)
    with suppress(BatchError):
        Batch.decode(one)
    with suppress(BatchError):
        Batch.parse(one)
    for mode in (one, "extend", "decode"):
        with suppress(BatchError):
            Batch.from_totals(
                mode=mode, q_tokens=two, kv_tokens=three, max_kv=three, next_n=four, pairs=four
            )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Batch.extend(None, [1]),  # type: ignore[arg-type]
        lambda: Batch.extend([_HUGE], [1]),
        lambda: Batch.decode(5),  # type: ignore[arg-type]
        lambda: Batch.decode([_HUGE]),
        lambda: Batch.verify([8], _HUGE),
        lambda: Batch.parse(None),  # type: ignore[arg-type]
        lambda: Batch.from_totals(mode=[], q_tokens=1, kv_tokens=1, max_kv=1),  # type: ignore[arg-type]
        lambda: Batch.from_totals(mode="extend", q_tokens=_HUGE, kv_tokens=_HUGE, max_kv=1),
        lambda: Batch.from_totals(mode="extend", q_tokens=1, kv_tokens=1, max_kv=_HUGE),
    ],
    ids=range(9),
)
def test_what_used_to_raise_something_else(make: Any) -> None:
    with pytest.raises(BatchError):
        make()


@pytest.mark.parametrize("size", ["x", None, [1], 1.5])
def test_a_graph_of_junk(size: Any) -> None:
    dispatcher = Dispatcher.open(gpu="none", model="deepseek-v3.2", heads=128, kv_dtype="fp8")

    with pytest.raises(BatchError):
        dispatcher.captured(size)
    with pytest.raises(BatchError):
        dispatcher.captured(1, contexts=5 if size is None else size)  # type: ignore[arg-type]
