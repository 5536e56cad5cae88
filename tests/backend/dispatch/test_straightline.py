"""Straight-line code answers what asking everything answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.baselines import SGLANG_0_5_23, VLLM_0_33_0, Rule
from nsa_tune.backend.baselines.baseline import Default
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.point_code import Asked
from nsa_tune.backend.dispatch.serving import Match, Serving
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Answer, Point, Setting
from nsa_tune.backend.types.records import Measurement, Status
from tests.backend.fake_point import FAKE, SETTING, Times, linear, measured, policy_of

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 8),
}
THREE = replace(
    FAKE,
    answers=(
        Answer(
            "prefill_path",
            {"mha": ("mha/dense",), "wide": ("mla/wide",), "packed": ("mla/packed",)},
        ),
    ),
)


def _serving(*policies: Policy, rule: Rule = SGLANG_0_5_23) -> Serving:
    return Serving(policies[0].setting, policies, source="made up", match=Match.EXACT, rule=rule)


def _batches(seed: int, count: int = 60) -> list[Batch]:
    random = Random(seed)
    found = []
    for _ in range(count):
        sequences = random.choice((1, 1, 2, 5))
        longest = 2 ** random.randint(1, 13)
        found.append(
            Batch.extend(
                [random.choice((0, random.randint(0, longest))) for _ in range(sequences)],
                [random.randint(1, longest) for _ in range(sequences)],
                captured=random.random() < 0.2,
            )
        )
    return found + [batch.sums for batch in found]


def _same(serving: Serving, batches: Sequence[Batch]) -> None:
    for batch in batches:
        assert serving.extend(batch) == serving.slow_plan(batch)


def _is_written(serving: Serving) -> bool:
    return serving.planner(Mode.EXTEND, 1) != serving.slow_plan


_weights = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 50))


@given(
    st.tuples(_weights, _weights, _weights),
    st.sampled_from(list(KVLayout)),
    st.sampled_from(["mha", "mla", "other"]),
    st.integers(0, 10**6),
)
@settings(max_examples=30)
def test_whatever_the_times_are_the_plans_are_the_same(
    weights: Any, layout: KVLayout, default: str, seed: int
) -> None:
    times = {arm: linear(*one) for arm, one in zip(TIMES, weights, strict=True)}
    rule = Rule("made up", {"prefill_path": Default(lambda batch, setting: default, "here")})
    serving = _serving(policy_of(times, replace(SETTING, layout=layout)), rule=rule)

    assert _is_written(serving)
    _same(serving, _batches(seed))


@given(st.integers(0, 10**6), st.sampled_from([Status.FAILED, Status.WRONG]))
@settings(max_examples=20)
def test_arms_that_failed_are_left_out_alike(seed: int, status: Status) -> None:
    random = Random(seed)
    rows = measured(TIMES)
    for i in random.sample(range(len(rows)), random.randint(1, 8)):
        rows[i] = replace(rows[i], status=status, latency_us=None, reason="no")

    _same(_serving(Policy.compile(FAKE, SETTING, rows)), _batches(seed))


def test_a_tie_goes_to_a_rule_that_depends_on_the_batch() -> None:
    times = {"mha/dense": linear(0, 0, 10), "mla/wide": linear(0, 0, 10.05)}

    def default(batch: Batch, setting: Setting) -> str:
        del setting
        return "mla" if batch.q_tokens * 2 > 99 else "mha"

    rule = Rule("made up", {"prefill_path": Default(default, "here")})
    serving = _serving(policy_of(times, replace(SETTING, layout=KVLayout.BF16)), rule=rule)

    assert _is_written(serving)
    assert serving.extend(Batch.extend([0], [49])).prefill_path == "mha"
    assert serving.extend(Batch.extend([0], [50])).prefill_path == "mla"


def test_three_choices_and_their_ties_are_compared() -> None:
    batches = _batches(3)
    for factors in ((1, 1, 1), (1, 2, 3), (3, 2, 1), (2, 1.001, 1), (1, 1, 2)):
        times = {
            arm: linear(0.1 * f, 0.01 * f, 5 * f) for arm, f in zip(TIMES, factors, strict=True)
        }
        serving = _serving(Policy.compile(THREE, SETTING, measured(times)))

        assert _is_written(serving)
        _same(serving, batches)


@given(
    st.sets(st.sampled_from(list(TIMES))),
    st.sampled_from([FAKE, THREE, replace(FAKE, answers=FAKE.answers[:1])]),
    st.sampled_from(["mha", "mla", "wide", "other"]),
    st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_arms_without_measurements_are_written_down_too(
    arms: set[str], point: Point, default: str, seed: int
) -> None:
    rule = Rule("made up", {"prefill_path": Default(lambda batch, setting: default, "here")})
    rows = measured({arm: TIMES[arm] for arm in TIMES if arm in arms})
    serving = _serving(Policy.compile(point, SETTING, rows), rule=rule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Asked, "chosen", None)  # so that asking it in the slow way would raise
        assert _is_written(serving)
        plans = [serving.extend(batch) for batch in _batches(seed)]

    assert plans == [serving.slow_plan(batch) for batch in _batches(seed)]


def test_a_sheet_that_the_models_choose_badly_on_leaves_to_the_surfaces() -> None:
    times: Times = {
        "mha/dense": lambda batch: 30.0 if batch.q_tokens in (8, 256) else 5.0,
        "mla/wide": lambda batch: 12.0,
        "mla/packed": lambda batch: 100.0,
    }
    policy = policy_of(times)
    serving = _serving(policy)

    assert policy.compiled.by_surfaces
    _same(serving, _batches(8))
    assert serving.extend(Batch.extend([256], [8])).prefill_path == "mla"
    assert serving.extend(Batch.extend([256], [64])).prefill_path == "mha"


def _rooted(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    return (sqrt(batch.q_tokens), float(batch.kv_tokens))


def _inverse(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    return (1 / (batch.q_tokens - 77), batch.kv_tokens)


@pytest.mark.parametrize("terms", [_rooted, _inverse])
def test_terms_that_cannot_be_followed_or_computed_go_the_slow_way(terms: Any) -> None:
    policy = Policy.compile(replace(FAKE, cost_terms=terms), SETTING, measured(TIMES))
    serving = _serving(policy)

    _same(serving, [*_batches(9), Batch.extend([0], [77])])


def test_two_policies_of_one_mode_are_asked_one_after_the_other() -> None:
    second = replace(
        FAKE, name="second",
        answers=(Answer("mha_kernel", {"fast": ("mla/wide",), "slow": ("mla/packed",)}),),
    )  # fmt: skip
    rows = [replace(row, point="second") for row in measured(TIMES)]
    serving = _serving(policy_of(TIMES), Policy.compile(second, SETTING, rows))

    assert _is_written(serving)
    _same(serving, _batches(4))
    assert serving.extend(Batch.extend([0], [8])).mha_kernel is not None


_LAYOUTS = replace(
    FAKE,
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY}),
    answers=(Answer("indexer_layout", {"native": ("mla/wide",), "flatten": ("mla/packed",)}),),
    sheet=lambda batch, setting: batch.next_n,
)


def _decoder(point: Point = _LAYOUTS) -> Serving:
    rows = [
        Measurement(point.name, str(batch), arm, Status.OK, us, us, us, 9)
        for n in (1, 4, 16)
        for context in (512, 4096, 32768)
        for batch in [Batch.verify([context] * n, 2)]
        for arm, us in (("mla/wide", 9 + context / 1e4), ("mla/packed", 8 + n * context / 1e4))
    ]
    return _serving(Policy.compile(point, SETTING, rows))


def test_decoding_is_written_by_next_n() -> None:
    serving = _decoder()
    for next_n in (1, 2, 3):
        for context in range(100, 40_000, 1111):
            for n in (1, 9):
                batch = Batch.verify([context] * n, next_n)
                plan = serving.steps[Mode.TARGET_VERIFY][next_n](batch)
                assert plan == serving.slow_plan(batch)
                assert plan.prefill_path is None


def test_any_number_of_next_n_is_answered() -> None:
    serving = _decoder()

    for next_n in range(1, 200):
        batch = Batch.draft_extend([500], next_n)
        assert serving.steps[Mode.DRAFT_EXTEND][next_n](batch).batch is batch
    assert len(serving.steps[Mode.DRAFT_EXTEND]) <= 64


@pytest.mark.parametrize("has_lens", [False, True])
def test_a_choice_alone_is_the_plan_s(has_lens: bool) -> None:
    serving = _serving(policy_of(TIMES))
    for name in ("prefill_path", "sparse_prefill"):
        choose = serving.chooser(name, Mode.EXTEND, 1, has_lens)
        for batch in _batches(6):
            assert choose(batch) == getattr(serving.slow_plan(batch), name)


@pytest.mark.parametrize(
    "batch",
    [Batch.verify([4096], 3), Batch.decode([4096]), Batch.verify([4096], 2, captured=True)],
    ids=["another next_n", "another mode", "captured"],
)
def test_a_choice_alone_is_right_for_batches_of_another_kind(batch: Batch) -> None:
    serving = _decoder()

    choose = serving.chooser("indexer_layout", Mode.TARGET_VERIFY, 2, False)

    assert choose(batch) == serving.slow_plan(batch).indexer_layout


def test_vllm_s_rule_can_be_followed() -> None:
    serving = _serving(policy_of(TIMES), rule=VLLM_0_33_0)

    assert _is_written(serving)
    _same(serving, _batches(7))
