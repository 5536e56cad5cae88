"""Reasons in words, and a whole plan as text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.baselines import DEFAULT_BASELINE, SGLANG_0_5_23
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import Choice, Verdict
from nsa_tune.backend.dispatch.explain import derived_reason, reason_of
from nsa_tune.backend.dispatch.plan import COPIES, DERIVED, Plan, coupled
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.records import Measurement
from tests.backend.fake_point import FAKE, SETTING, Times, linear, policy_of, sharing_rows

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 18),
}
CHOICE = Choice(
    question="prefill_path",
    choice="mla",
    verdict=Verdict.WIN,
    estimates={"mha": Estimate(2010, 2000, 2020, False), "mla": Estimate(20.0, 19, 21, False)},
    arms={"mha": "mha/dense", "mla": "mla/packed"},
    forbidden={},
    default="mha",
)


def _explained(batch: Batch, times: Times = TIMES) -> str:
    return Dispatcher(SETTING, [policy_of(times)], source="made up").explain(batch)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (CHOICE, "mla (20 us) is faster than mha (2010 us) by 100x"),
        (
            replace(CHOICE, verdict=Verdict.UNSURE),
            "mla (20 us) looks faster than mha (2010 us) by 100x, which the intervals leave open",
        ),
        (
            replace(CHOICE, verdict=Verdict.TIE, choice="mha", tied=("mha", "mla")),
            "mha and mla take equally long; mha is SGLang 0.5.23's",
        ),
        (
            replace(CHOICE, verdict=Verdict.TIE, tied=("mla", "other")),
            "mla and other take equally long; mla comes first",
        ),
        (
            replace(CHOICE, verdict=Verdict.ONLY, forbidden={"mha": "too long"}),
            "only mla is allowed; not mha: too long",
        ),
        (
            replace(
                CHOICE,
                verdict=Verdict.ONLY,
                forbidden={
                    "fa3": "mha/fa3 has no kernels for cpu",
                    "fa2": "mha/fa2 has no kernels for cpu",
                    "sdpa": "mha/sdpa is declared for GPUs only",
                },
            ),
            "only mla is allowed; not fa3, fa2: no kernels for cpu; not sdpa: declared for GPUs "
            "only",
        ),
        (
            replace(CHOICE, verdict=Verdict.BASELINE, choice="mha", estimates={}),
            "too little is measured here; SGLang 0.5.23 takes mha",
        ),
        (
            replace(CHOICE, verdict=Verdict.BASELINE, estimates={}, forbidden={"mha": "too long"}),
            "too little is measured here, and SGLang 0.5.23's mha is not allowed; "
            "not mha: too long",
        ),
        (
            replace(CHOICE, verdict=Verdict.NONE, choice=None, estimates={}),
            "every choice is forbidden",
        ),
        (
            replace(CHOICE, estimates={**CHOICE.estimates, "mha": Estimate(30.0, 9, 99, True)}),
            "mla (20 us) is faster than mha (30 us) by 1.5x, estimated from outside of the "
            "measured range",
        ),
    ],
)
def test_a_reason_is_one_sentence(choice: Choice, text: str) -> None:
    assert reason_of(choice, SGLANG_0_5_23, "a table").text == text


@pytest.mark.parametrize(
    ("verdict", "source"),
    [
        (Verdict.WIN, "a table"),
        (Verdict.TIE, "a table"),
        (Verdict.UNSURE, "a table"),
        (Verdict.ONLY, "hard limits"),
        (
            Verdict.BASELINE,
            "SGLang 0.5.23 layers/attention/dsa_backend.py:4049, "
            "models/deepseek_common/attention_backend_handler.py:108",
        ),
        (Verdict.NONE, "hard limits"),
    ],
)
def test_a_reason_names_what_decided(verdict: Verdict, source: str) -> None:
    choice = replace(CHOICE, verdict=verdict, tied=("mha", "mla"))

    assert reason_of(choice, SGLANG_0_5_23, "a table").source == source


def test_an_explanation_names_batch_source_times_and_limits() -> None:
    lines = _explained(Batch.extend([2048], [64])).splitlines()

    assert lines[0] == "batch   extend:2048+64"
    assert lines[1].strip() == "sequences 1, new tokens 64, kv tokens 2112, longest 2112"
    assert lines[2] == "source  made up"
    assert "prefill_path = mla  (only)" in lines
    assert "    only mla is allowed; not mha: too long for dense" in lines
    assert "    packed                50 us  [50 us, 50.1 us]" in lines
    assert "skip_topk = False  (forced)" in lines


def test_the_estimates_are_listed_fastest_first() -> None:
    text = _explained(Batch.extend([1024], [8]))

    assert text.index("packed                22 us") < text.index("wide                25.5 us")


def test_a_capture_is_mentioned() -> None:
    assert "longest 64, captured" in _explained(Batch.extend([0], [64], captured=True))


def test_a_long_ragged_batch_is_shortened() -> None:
    first = _explained(Batch.extend(range(200), range(1, 201))).splitlines()[0]

    assert first.endswith("...")
    assert len(first) < 120


@pytest.mark.parametrize(
    ("batch", "name", "text"),
    [
        (Batch.extend([0], [64]), "dequantize_prefix", "there is no prefix"),
        (Batch.extend([8], [64]), "skip_topk", "no sequence is longer than index_topk"),
        (Batch.decode([64]), "skip_topk", "the batch decodes"),
    ],
)
def test_what_follows_says_from_what(batch: Batch, name: str, text: str) -> None:
    reason = Dispatcher(SETTING, [policy_of(TIMES)], source="x").plan(batch).reasons[name]

    assert reason.verdict is Verdict.FORCED
    assert reason.source == "coupled as in SGLang 0.5.23"
    assert reason.text.startswith(text)


@pytest.mark.parametrize(("layers", "words"), [(1, "1 layer"), (61, "61 layers"), (0, "61 layers")])
def test_what_an_arm_takes_once_a_pass_is_told(layers: int, words: str) -> None:
    setting = replace(SETTING, layers=layers)
    by = Dispatcher(setting, [Policy.fit(FAKE, setting, sharing_rows())], source="made up")

    told = [
        line for line in by.explain(Batch.extend([3000], [64])).splitlines() if "a pass" in line
    ]

    assert told == [f"fake mla/packed takes 300 us once a pass, spread over {words}"]


def test_the_cost_of_a_pass_is_the_weighted_mean_of_the_rows_that_have_one() -> None:
    def cost(row: Measurement) -> float | None:
        batch = Batch.parse(row.batch)
        # A table's rows may be older than costs of a pass.
        older = row.arm != "mla/packed" or batch.q_tokens == 256
        return None if older else 10.0 if batch.prefix_tokens < 1000 else 30.0

    rows = [replace(row, pass_us=cost(row)) for row in sharing_rows()]
    by = Dispatcher(SETTING, [Policy.fit(FAKE, SETTING, rows)], source="made up")
    batch = Batch.extend([700], [100])
    used = by.plan(batch).reasons["sparse_prefill"].rows
    parts = {10.0: 0.0, 30.0: 0.0, None: 0.0}
    for row in used:
        if row.arm == "mla/packed":
            parts[row.pass_us] += row.weight
    assert all(parts.values()), "the estimate rests on rows of each kind"
    mean = (10 * parts[10.0] + 30 * parts[30.0]) / (parts[10.0] + parts[30.0])

    assert f"mla/packed takes {mean:.3g} us once a pass, spread over" in by.explain(batch)


def test_without_a_cost_of_a_pass_none_is_told() -> None:
    assert "once a pass" not in _explained(Batch.extend([2048], [64]))


def test_a_contradiction_names_the_latency_models() -> None:
    ahead = replace(CHOICE, verdict=Verdict.UNSURE, choice="mha")
    alone = replace(CHOICE, verdict=Verdict.UNSURE, estimates={})

    texts = [reason_of(one, SGLANG_0_5_23, "a table").text for one in (ahead, alone)]
    assert texts == [
        "too close to tell: the latency models take mha (2010 us), the measurements nearby speak "
        "for mla (20 us)",
        "the latency models take mla; too little is measured nearby to confirm it",
    ]


def test_an_interval_that_says_nothing_is_told_in_words() -> None:
    """Times that jump by a factor of 1000 from one batch to the next."""
    jumping = {name: lambda batch: (1.0, 1000.0)[batch.q_tokens.bit_length() % 2] for name in TIMES}
    batch = Batch.extend([0], [100])
    found = Dispatcher(SETTING, [policy_of(jumping)], source="made up")

    intervals = [
        high / low
        for reason in found.plan(batch).reasons.values()
        for low, high in reason.intervals_us.values()
    ]
    assert max(intervals) > 100
    assert "[may be off by more than 10x: too little is measured nearby]" in found.explain(batch)
    assert "off by more" not in _explained(batch)


def test_every_conversion_that_a_plan_may_have_is_explained() -> None:
    for pool, path, reader in product(KVLayout, ("mha", "mla"), COPIES):
        for mode in (Mode.EXTEND, Mode.DECODE):
            derived = coupled(mode, pool, path, reader, True, False, reader)
            plan = SimpleNamespace(**derived._asdict())
            for name in DERIVED:
                assert derived_reason(cast("Plan", plan), name, DEFAULT_BASELINE).text
