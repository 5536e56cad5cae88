"""Where a lead is told from a batch's sums, all models together say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.model import CostModel
from nsa_tune.backend.dispatch.decide import MARGIN
from nsa_tune.backend.dispatch.leads import (
    Contest,
    Lead,
    bounds_of,
    form_of,
    holding,
    leads,
    typical,
)
from nsa_tune.backend.dispatch.tracing import Leaf, SymbolicBatch, Trace
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Point, Setting
from tests.backend.fake_point import SETTING

BATCHES = typical(Mode.EXTEND, 1)
RIVALS = Contest({"a": ("one",), "b": ("two",)}, Leaf("neither"))

TERMS = POINTS["prefill"].terms
LONG = [batch for batch in BATCHES if batch.max_kv > 2048 and batch.prefix_tokens]


def _leads(
    weights: Mapping[str, tuple[float, ...]],
    *contests: Contest,
    limits: Mapping[str, str] | None = None,
) -> list[Lead]:
    """The leads of models of prefill's terms on long batches with a prefix."""
    trace = Trace()
    symbols = SymbolicBatch(trace, Mode.EXTEND, 1, None, has_lens=False)
    batch, facts = cast("Batch", symbols), symbols.facts
    facts |= trace.consequences(batch.max_kv <= 2048, False)  # type: ignore[arg-type]
    facts |= trace.consequences(batch.q_tokens < batch.kv_tokens, True)  # type: ignore[arg-type]
    facts |= trace.consequences(batch.q_tokens * 2048 < batch.pairs, True)  # type: ignore[arg-type]
    point = POINTS["prefill"]
    terms = trace.follow(lambda: point.cost_terms(batch, SETTING), facts)
    assert point.term_bounds is not None
    bounds = point.term_bounds
    pairs = trace.follow(lambda: bounds(batch, SETTING), facts)
    assert isinstance(terms, Leaf)
    assert isinstance(pairs, Leaf)
    forms = {arm: form_of(some, terms.value) for arm, some in weights.items()}
    free = {arm: (limits or {}).get(arm, "") or False for arm in weights}
    return leads(contests or (RIVALS,), forms, bounds_of(terms.value, pairs.value), free, LONG)


def _time(weights: tuple[float, ...], batch: Batch) -> float:
    return CostModel(weights).latency_us(POINTS["prefill"].cost_terms(batch, SETTING))


_weight = st.one_of(st.just(0.0), st.floats(1e-7, 1e-2))
_weights = st.tuples(*[_weight] * len(TERMS), st.floats(0.1, 50))


@given(_weights, _weights, st.sampled_from(["a", "b", "neither"]))
@settings(max_examples=150)
def test_a_lead_holds_only_where_the_winner_is_taken(
    one: tuple[float, ...], two: tuple[float, ...], rule: str
) -> None:
    weights = {"one": one, "two": two}
    long = [batch for batch in LONG if batch.q_tokens * 2048 < batch.pairs]
    for lead in _leads(weights, RIVALS._replace(rule=Leaf(rule))):
        assert len(lead.losers) == 1
        (loser,) = lead.losers
        # Where the rule takes the winner's choice it is taken on a tie too.
        favoured = rule == {"one": "a", "two": "b"}[lead.winner]
        for i in holding(lead.text or "True", long):
            won, lost = _time(weights[lead.winner], long[i]), _time(weights[loser], long[i])
            assert won <= lost * (1 + MARGIN) if favoured else won * (1 + MARGIN) < lost


WORK = (0.0, 0.1, *[0.0] * (len(TERMS) - 2))


def test_a_lead_by_one_sum_is_one_comparison() -> None:
    flat, steep = (*[0.0] * len(TERMS), 50.0), (*WORK, 1.0)
    found = {lead.winner: lead.text for lead in _leads({"one": flat, "two": steep})}

    assert found["one"].startswith("batch.q_tokens >= 49")


def test_a_lead_that_is_certain_has_no_condition_but_the_winners_limit() -> None:
    weights = {"one": (*WORK, 1.0), "two": (0.0, 0.2, *WORK[2:], 2.0)}
    limit = "batch.q_tokens >= 99999"
    (certain,) = _leads(weights)
    (limited,) = _leads(weights, limits={"one": limit})

    assert certain == Lead("one", ("two",), "")
    assert limited.text == f"not ({limit})"
    assert limited.standing({"one": limit, "two": ""}) == {"one": ""}


def test_there_is_no_lead_where_the_losers_answer_another_question() -> None:
    weights = {"one": (*WORK, 1.0), "two": (*WORK, 2.0), "three": (*WORK, 3.0)}
    kernels = Contest({"x": ("two",), "y": ("three",)}, Leaf("x"))
    paths = Contest({"a": ("one",), "b": ("two", "three")}, Leaf("a"))

    assert _leads(weights, paths)
    assert not _leads(weights, paths, kernels)


def test_there_is_no_lead_among_arms_of_several_choices() -> None:
    weights = {"one": (*WORK, 1.0), "two": (0.0, 0.2, *WORK[2:], 2.0)}
    both = Contest({"a": ("one",), "b": ("one", "two")}, Leaf("a"))

    assert not _leads(weights, both)


def test_a_lead_that_seldom_holds_is_not_asked_for() -> None:
    few = (*WORK, 1.0)
    many = (*WORK[:1], 0.0, *WORK[2:], 1e9)

    assert [lead.winner for lead in _leads({"one": few, "two": many})] == ["one"]


@pytest.mark.parametrize("name", [name for name, one in POINTS.items() if one.term_bounds])
@given(seed=st.integers(0, 10**9), sms=st.sampled_from([1, 78, 132, 148]))
@settings(max_examples=60)
def test_terms_of_sums_lie_within_their_bounds(name: str, seed: int, sms: int) -> None:
    point, random = POINTS[name], Random(seed)
    setting = replace(SETTING, device=replace(SETTING.device, sms=sms))
    for batch in (_odd(point, random), point.sample(setting, random).sums):
        _check(point, batch, setting)


def _odd(point: Point, random: Random) -> Batch:
    """Any sums that a batch may have: pairs that its lengths do not tell, and far too many."""
    extends = Mode.EXTEND in point.modes
    sequences = random.choice((1, 2, 7, 64, 1000))
    new = random.choice((1, 3, 129, 5000)) if extends else random.choice((1, 2, 4))
    q_tokens = sequences * new + (random.randrange(sequences) if extends else 0)
    kv_tokens = q_tokens + random.choice((0, 1, 500, 10**6, 10**9))
    most = kv_tokens - (sequences - 1)
    max_kv = random.randint(-(-kv_tokens // sequences), most)
    pairs = random.randint(q_tokens, q_tokens * max_kv)
    mode = "extend" if extends else "target_verify"
    sums: dict[str, Any] = {"q_tokens": q_tokens, "kv_tokens": kv_tokens, "max_kv": max_kv}
    return Batch.from_totals(mode=mode, sequences=sequences, pairs=pairs, **sums)


def _check(point: Point, batch: Batch, setting: Setting) -> None:
    assert point.term_bounds is not None
    terms, bounds = point.cost_terms(batch, setting), point.term_bounds(batch, setting)
    for name, term, pair in zip(point.terms, terms, bounds, strict=True):
        if pair is not None:
            least, most = pair
            assert least <= term * (1 + 1e-12), name
            assert term <= most * (1 + 1e-12), name
