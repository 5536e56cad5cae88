"""The cases that are run in vLLM, and what is said of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.vllm.cases import BLOCK, CASES, Case, cases_of
from benchmarks.vllm.measured import Measured, Pass, Spread, apart, best, way_of

_CASES = st.builds(
    Case,
    prefix=st.integers(0, 999).map(lambda blocks: blocks * BLOCK),
    new=st.integers(1, 9999),
    sequences=st.integers(1, 64),
    decodes=st.integers(0, 64),
)


@given(st.lists(_CASES, min_size=1, max_size=5))
def test_cases_are_read_as_they_are_written(cases: list[Case]) -> None:
    text = ",".join(f"{one.prefix}:{one.new}:{one.sequences}:{one.decodes}" for one in cases)
    assert cases_of(text) == tuple(cases)


def test_the_built_in_cases_hold_those_where_vllm_loses_most() -> None:
    assert cases_of("") == CASES
    assert any(one.prefix + one.new > 2048 and one.new >= 8192 for one in CASES)
    assert {Case(0, 200, 4), Case(1920, 64, 4)} <= set(CASES)
    assert all(one.prefix % BLOCK == 0 for one in CASES)


@pytest.mark.parametrize("text", ["1:x", "64", "0:1:1:1:1", "63:1:1", "0:0:1", "0:1:0", "-64:1:1"])
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a case is|cannot be run"):
        cases_of(text)


@given(st.lists(st.floats(0.1, 100), min_size=1))
def test_a_spread_holds_its_median(values: list[float]) -> None:
    found = Spread.of(values)
    assert found.least <= found.median <= found.most
    assert (found.least, found.most) == (min(values), max(values))


def test_outputs_are_compared_over_the_tokens_that_both_have() -> None:
    some, others = [{1: -1.0, 2: -2.0}, {3: -1.0}], [{1: -1.5, 4: -9.0}, {3: -1.25}]
    assert apart(some, others) == 0.5
    assert apart(some, some) == 0.0
    assert math.isnan(apart([{1: 0.0}], [{2: 0.0}]))
    assert best({7: -1.0, 3: -1.0, 9: -2.0}) == 3


def _pass(ms: float, way: str, output: dict[int, float]) -> Pass:
    return Pass(ms, (way,), [output])


def test_a_record_pairs_the_passes_of_each_round() -> None:
    found = Measured(Case(8192, 2048))
    same, other = {5: -0.5, 6: -1.0}, {5: -1.5, 6: -0.75}
    for off, on, again in ((4.0, 2.0, 6.0), (8.0, 8.0, 8.0), (3.0, 1.0, 3.0)):
        passes = _pass(off, "decode kernel", same), _pass(on, "sparse kernel", other)
        found.add(*passes, _pass(again, "decode kernel", same))
    record = json.loads(json.dumps(found.record()))

    assert record["ratio"] == {"median": 2.5, "least": 1.0, "most": 3.0}
    assert record["ratio_off_off"]["least"] == pytest.approx(4 / 6)
    assert record["off_ms"] == {"median": 5.0, "least": 3.0, "most": 8.0}
    assert (record["off_way"], record["on_way"]) == (["decode kernel"], ["sparse kernel"])
    assert (record["apart_off_on"], record["apart_off_off"]) == (1.0, 0.0)
    assert (record["same_best_token"], record["tokens"]) == (0, 3)
    assert "8192+2048 x1: off 5.00 ms (decode kernel), on 2.00 ms (sparse kernel)" in found.line()


@pytest.mark.parametrize(
    ("decodes", "prefills", "dense", "mixed", "way"),
    [
        (4, 0, None, True, "as decodes"),
        (0, 4, True, True, "MHA"),
        (0, 1, False, True, "decode kernel"),
        (0, 1, False, False, "sparse kernel"),
        (2, 1, False, False, "2 as decodes, sparse kernel"),
    ],
)
def test_the_way_is_read_off_the_metadata(
    decodes: int, prefills: int, dense: bool | None, mixed: bool, way: str
) -> None:
    metadata = SimpleNamespace(
        num_decodes=decodes, num_prefills=prefills, fp8_use_mixed_batch=mixed,
        prefill=None if dense is None else SimpleNamespace(use_dense_mha=dense),
    )  # fmt: skip
    assert way_of(metadata) == way
    assert way_of(metadata, dense=True).endswith("MHA") == bool(prefills)


def test_without_an_fp8_pool_there_is_no_mixed_batch() -> None:
    prefill = SimpleNamespace(use_dense_mha=False)
    metadata = SimpleNamespace(num_decodes=0, num_prefills=1, prefill=prefill)
    assert way_of(metadata) == "sparse kernel"
