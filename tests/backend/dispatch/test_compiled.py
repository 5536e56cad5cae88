"""The function that a table is compiled to decides what asking everything decides."""

from __future__ import annotations

import ast
import inspect
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log2, sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.baselines import BASELINES, SGLANG_0_5_23, VLLM_0_33_0, Baseline, Default
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.plan import Plan
from nsa_tune.backend.dispatch.table_planner import Match, TablePlanner
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.formula import NO_ROWS, Formulas, Limit, Switch, Value, function_of
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, Guard, Point, Question
from nsa_tune.backend.types.records import Measurement, Status
from tests.backend.fake_point import (
    BATCHES,
    FAKE,
    FORMULAS,
    SETTING,
    Times,
    linear,
    measured,
    policy_of,
)

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 8),
}


class _Counting(TablePlanner):
    """Counts how often everything is asked."""

    asked = 0

    def slow_plan(self, batch: Batch) -> Plan:
        self.asked += 1
        return super().slow_plan(batch)


def _planner(*policies: Policy, baseline: Baseline = SGLANG_0_5_23) -> _Counting:
    planner = _Counting(
        policies[0].setting, policies, source="made up", match=Match.EXACT, baseline=baseline
    )
    planner.prepare()
    return planner


def _always(choice: str | Switch) -> Baseline:
    return Baseline("made up", {"prefill_path": Default(lambda setting: choice, "here")})


def _extends(seed: int, count: int = 40) -> list[Batch]:
    """Random extends, some of them captured, by lengths and by sums."""
    random, found = Random(seed), []
    for _ in range(count):
        longest, sequences = 2 ** random.randint(1, 13), random.choice((1, 1, 2, 5))
        prefixes = [random.choice((0, random.randint(0, longest))) for _ in range(sequences)]
        news = [random.randint(1, longest) for _ in range(sequences)]
        found.append(Batch.extend(prefixes, news, captured=random.random() < 0.2))
    return [*found, *(batch.sums for batch in found)]


def _same(planner: _Counting, batches: Iterable[Batch]) -> None:
    """Plans, and each choice alone, are those of the slow way, and made without it."""
    batches = list(batches)
    before = planner.asked
    plans = [planner.extend(batch) for batch in batches]
    choices = {
        name: [planner.chooser(name, Mode.EXTEND)(batch) for batch in batches]
        for name in planner.questions(Mode.EXTEND)
    }
    both = planner.choosers(planner.questions(Mode.EXTEND)[::-1][:2], Mode.EXTEND)
    pairs = [both(batch) for batch in batches]
    if not any(policy.fitted.by_surfaces for policy in planner.policies.values()):
        assert planner.asked == before
    for i, batch in enumerate(batches):
        slow = planner.slow_plan(batch)
        assert plans[i] == slow
        for name, own in choices.items():
            assert own[i] == getattr(slow, name)
        assert pairs[i] == tuple(getattr(slow, name) for name in [*choices][::-1][:2])


# --- made-up points of every kind

_ARMS = ("a/x", "a/y", "a/z", "b/x", "b/y", "c")
_LIMITS = (
    NO_ROWS,
    "True",
    "captured",
    "max_kv > 2048",
    "q_tokens > 4096",
    "q_tokens > 300",
    "pairs > 100000 or batch_size == 2",
)
_REGIMES = ("0", "1 if prefix_tokens else 0", "batch_size % 3", "2 * captured + (max_kv > 900)")
_FORMULAS = Formulas(
    values={
        "twice": Value("2.0 * q_tokens"),
        "tiles, rest": Value("-(-q_tokens // 128), q_tokens % 128"),
        "spread": Value("0", "max_kv - min(batch.kv_lens)"),
        "root": Value("sqrt(kv_tokens) if twice < 999 else tiles"),
    },
    features=("batch_size", "twice", "tiles", "spread", "root"),
    coordinates={"twice": "log2(twice)", "kv_tokens": "log2(kv_tokens)"},
    functions={"log2": log2, "sqrt": sqrt},
)


def _never(*_: object) -> Any:
    raise AssertionError


def _guard(random: Random) -> Guard:
    passed = random.choice(_LIMITS)
    return Guard(passed, "formula", "", lambda setting: (Limit(passed, f"{passed} holds"),))


def _any_point(random: Random) -> Point:
    """Arms of several paths, any of which any choice may share with others."""
    names = random.sample(_ARMS, random.randint(1, len(_ARMS)))
    arms = tuple(
        Arm(
            name,
            _never,
            frozenset(KVLayout),
            guards=tuple(_guard(random) for _ in range(random.choice((0, 0, 1, 2)))),
            surcharge=random.choice((None, lambda setting: "5.5 if q_tokens > 100 else 0.0")),
        )
        for name in names
    )
    fields = random.sample(("prefill_path", "mha_kernel", "sparse_prefill", "v4_prefill_c4"), 2)
    formulas = _FORMULAS._replace(regime=random.choice(_REGIMES))
    return replace(
        FAKE,
        arms=arms,
        questions=tuple(Question(name, _choices(random, names)) for name in fields),
        formulas=lambda setting: formulas,
        regimes_alike=random.choice((1, 2)),
    )


def _choices(random: Random, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    words = ("mha", "mla", "third", "fourth")[: random.randint(1, 4)]
    return {w: tuple(random.sample(names, random.randint(1, len(names)))) for w in words}


def _any_rows(point: Point, random: Random) -> list[Measurement]:
    """Arms that tie, fail, give wrong outputs, or were never measured."""
    rows, noise = [], random.choice((0.0, 0.0, 0.3))
    bad = random.choice((0.0, 0.05))
    for arm in point.arms:
        time_us = linear(random.choice((0, 0.1, 0.101)), random.choice((0, 0.01)), 10)
        for batch in BATCHES[:: random.choice((1, 1, 5, 99))] if random.random() < 0.8 else ():
            us = time_us(batch) * 2 ** random.gauss(0, noise)
            row = Measurement(point.name, str(batch), arm.name, Status.OK, us, us, us)
            if random.random() < bad:
                status = random.choice((Status.FAILED, Status.FAILED, Status.WRONG))
                row = replace(row, status=status, latency_us=None, reason="no")
            rows.append(row)
    return rows


@given(
    st.integers(0, 10**9),
    st.sampled_from(["mha", "mla", "other", Switch("q_tokens > 200", "mla", "other")]),
)
@settings(max_examples=200)
def test_any_table_of_any_point_is_answered_alike(seed: int, choice: str | Switch) -> None:
    random = Random(seed)
    point = _any_point(random)
    policy = Policy.fit(point, SETTING, _any_rows(point, random))

    _same(_planner(policy, baseline=_always(choice)), _extends(seed, 25))


@given(
    st.tuples(*[st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 50))] * 3),
    st.sampled_from(list(KVLayout)),
    st.sampled_from([SGLANG_0_5_23, VLLM_0_33_0]),
    st.integers(0, 10**6),
)
@settings(max_examples=30)
def test_any_times_are_answered_alike(
    weights: Any, layout: KVLayout, baseline: Baseline, seed: int
) -> None:
    times = {arm: linear(*one) for arm, one in zip(TIMES, weights, strict=True)}

    _same(
        _planner(policy_of(times, replace(SETTING, layout=layout)), baseline=baseline),
        _extends(seed),
    )


# --- one at a time


def _path_of(baseline: Baseline, batch: Batch) -> str | None:
    """The path where dense and sparse tie."""
    times = {"mha/dense": linear(0, 0, 10), "mla/wide": linear(0, 0, 10.05)}
    return _planner(policy_of(times), baseline=baseline).extend(batch).prefill_path


def test_a_tie_goes_to_a_baseline_that_looks_at_the_batch() -> None:
    switch = Switch("2 * q_tokens > 99", "mla", "mha")

    assert _path_of(_always(switch), Batch.extend([0], [49])) == "mha"
    assert _path_of(_always(switch), Batch.extend([0], [50])) == "mla"


def test_a_tie_goes_to_a_baseline_that_never_changes() -> None:
    assert _path_of(_always("mla"), Batch.extend([0], [49])) == "mla"
    assert _path_of(_always("neither"), Batch.extend([0], [49])) == "mha"


def test_two_choices_of_the_same_arms_tie() -> None:
    question = Question("prefill_path", {"one": ("mla/wide",), "two": ("mla/wide",)})
    point = replace(FAKE, questions=(question, *FAKE.questions[1:]))
    policy = Policy.fit(point, SETTING, measured(TIMES))

    planner = _planner(policy, baseline=_always("two"))

    assert planner.extend(BATCHES[3]).prefill_path == "two"
    _same(planner, _extends(1))


def test_a_choice_may_have_several_arms_of_several_paths() -> None:
    """In any order."""
    names = ["a/x", "b/x", "a/y", "b/y", "a/z"]
    arms = tuple(Arm(name, _never, frozenset(KVLayout)) for name in names)
    question = Question("prefill_path", {"all": tuple(names), "some": ("b/y", "a/z", "b/x")})
    point = replace(FAKE, arms=arms, questions=(question,))
    rows = [
        Measurement(FAKE.name, str(batch), name, Status.OK, us, us, us)
        for batch in BATCHES
        for i, name in enumerate(names)
        for us in [linear(0.1 * (i % 3), 0.01, 5 + i)(batch)]
    ]

    _same(_planner(Policy.fit(point, SETTING, rows)), _extends(2))


def test_where_the_models_choose_badly_the_surfaces_decide() -> None:
    times: Times = {
        "mha/dense": lambda batch: 30.0 if batch.q_tokens in (8, 256) else 5.0,
        "mla/wide": lambda batch: 12.0,
        "mla/packed": lambda batch: 100.0,
    }
    planner = _planner(policy_of(times))

    assert planner.policies["fake"].fitted.by_surfaces
    _same(planner, _extends(8))
    assert planner.extend(Batch.extend([256], [8])).prefill_path == "mla"
    assert planner.extend(Batch.extend([256], [64])).prefill_path == "mha"


def test_two_points_of_one_mode_are_compiled_into_one_function() -> None:
    questions = (Question("mha_kernel", {"fast": ("mla/wide",), "slow": ("mla/packed",)}),)
    second = replace(FAKE, name="second", questions=questions)
    rows = [replace(row, point="second") for row in measured(TIMES)]
    planner = _planner(policy_of(TIMES), Policy.fit(second, SETTING, rows))

    _same(planner, _extends(4))
    assert planner.extend(Batch.extend([0], [8])).mha_kernel is not None


def _working(name: str, field: str, value: Value, **functions: Any) -> Policy:
    """The fake point by a name of its own, with a value `work` as its first feature."""
    formulas = FORMULAS._replace(
        values={"work": value},
        features=("work", "kv_tokens"),
        functions={"log2": log2, **functions},
    )
    questions = (Question(field, FAKE.questions[1].choices),)
    point = replace(FAKE, name=name, questions=questions, formulas=lambda setting: formulas)
    return Policy.fit(point, SETTING, [replace(row, point=name) for row in measured(TIMES)])


def test_two_points_may_have_different_values_of_one_name() -> None:
    one = _working("one", "prefill_path", Value("2.0 * q_tokens"))
    two = _working("two", "mha_kernel", Value("q_tokens + 7.0 * batch_size"))

    _same(_planner(one, two), _extends(5))


def test_two_points_must_not_mean_different_functions_by_one_name() -> None:
    one = _working("one", "prefill_path", Value("f(q_tokens)"), f=lambda q: q)
    two = _working("two", "mha_kernel", Value("f(q_tokens)"), f=lambda q: 9 * q)

    with pytest.raises(ValueError, match="two points mean different functions by f"):
        _planner(one, two).extend(BATCHES[0])


def test_a_batch_without_queries_is_asked_about() -> None:
    """An idle rank of data parallelism has one."""
    planner, idle = _planner(policy_of(TIMES)), replace(BATCHES[0], q_tokens=0)

    assert planner.extend(idle) == planner.slow_plan(idle)


@pytest.mark.parametrize("odd", ["1 / (q_tokens - 77)", "log2(q_tokens - 77)"])
def test_features_that_cannot_be_computed_leave_it_to_the_baseline(odd: str) -> None:
    formulas = FORMULAS._replace(values={"odd": Value(odd)}, features=("odd", "kv_tokens"))
    rows = measured(TIMES, [batch for batch in BATCHES if batch.q_tokens > 77])
    times = (row for row in rows if row.latency_us is not None)
    point = replace(FAKE, formulas=lambda setting: formulas)
    policy = Policy.fit(
        point, SETTING, [replace(row, latency_us=10 * (i % 7 + 1)) for i, row in enumerate(times)]
    )
    planner, batch = _planner(policy), Batch.extend([0], [77])

    assert planner.extend(batch) == planner.slow_plan(batch)
    assert planner.extend(batch).prefill_path == "mha"


# --- other modes

_LAYOUTS = replace(
    FAKE,
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY}),
    questions=(Question("indexer_layout", {"native": ("mla/wide",), "flatten": ("mla/packed",)}),),
    formulas=lambda setting: FORMULAS._replace(regime="next_n"),
)


def _decoder(baseline: Baseline = SGLANG_0_5_23) -> _Counting:
    rows = [
        Measurement(_LAYOUTS.name, str(batch), arm, Status.OK, us, us, us, 9)
        for n in (1, 4, 16)
        for context in (512, 4096, 32768)
        for batch in [Batch.verify([context] * n, 2)]
        for arm, us in (("mla/wide", 9 + context / 1e4), ("mla/packed", 8 + n * context / 1e4))
    ]
    return _planner(Policy.fit(_LAYOUTS, SETTING, rows), baseline=baseline)


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=list(BASELINES))
def test_steps_of_any_next_n_are_planned_alike(baseline: Baseline) -> None:
    planner = _decoder(baseline)
    batches = [
        make([context] * n, next_n)
        for make in (Batch.verify, Batch.draft_extend)
        for next_n in (1, 2, 3, 150)
        for context in range(200, 40_000, 1999)
        for n in (1, 9)
    ]
    plans = [planner.step(batch) for batch in batches]

    assert not planner.asked
    assert plans == [planner.slow_plan(batch) for batch in batches]
    assert {plan.indexer_layout for plan in plans} == {"native", "flatten", None}


@pytest.mark.parametrize(
    "batch",
    [Batch.verify([4096], 3), Batch.decode([4096]), Batch.verify([4096], 2, captured=True)],
    ids=["another next_n", "another mode", "captured"],
)
def test_a_choice_alone_is_right_for_batches_of_another_kind(batch: Batch) -> None:
    planner = _decoder()

    choose = planner.chooser("indexer_layout", Mode.TARGET_VERIFY)

    assert choose(batch) == planner.slow_plan(batch).indexer_layout


def test_a_forced_arm_is_asked_about() -> None:
    planner = TablePlanner(
        SETTING, [policy_of(TIMES)], source="made up", match=Match.EXACT, baseline=SGLANG_0_5_23,
        forced={"fake": "mla/packed"},
    )  # fmt: skip

    for batch in _extends(6):
        assert planner.extend(batch) == planner.slow_plan(batch)
        slow = planner.slow_plan(batch)
        assert planner.chooser("sparse_prefill", Mode.EXTEND)(batch) == slow.sparse_prefill
        both = planner.choosers(("sparse_prefill", "prefill_path"), Mode.EXTEND)
        assert both(batch) == (slow.sparse_prefill, slow.prefill_path)


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=list(BASELINES))
def test_the_conditions_of_a_baseline_are_true_or_false(baseline: Baseline) -> None:
    """They are part of a key, of which there must be few."""
    for arch in ("sm90", "sm100"):
        setting = replace(SETTING, device=replace(SETTING.device, arch=arch))
        for point in POINTS.values():
            for question in point.questions:
                choice = baseline.choice(question, setting)
                for batch in (*_extends(7), Batch.verify([99], 2), Batch.decode([9])):
                    if isinstance(choice, Switch):
                        assert type(function_of(choice.condition)(batch)) is bool


# --- the code itself


def test_the_source_can_be_read_and_is_shown_where_it_fails() -> None:
    def fails(q_tokens: int) -> float:
        if q_tokens == 77:
            raise RuntimeError("no such batch")
        return float(q_tokens)

    policy = _working("one", "prefill_path", Value("work_of(q_tokens)"), work_of=fails)
    planner = _planner(policy)

    assert "work = work_of(q_tokens)" in inspect.getsource(planner.extend)
    with pytest.raises(RuntimeError) as caught:
        planner.extend(Batch.extend([0], [77]))
    shown = "".join(traceback.format_exception(caught.value))
    assert 'File "<nsa_tune planned ' in shown
    assert "work = work_of(q_tokens)\n" in shown


def test_an_arm_that_another_always_beats_is_not_timed() -> None:
    times: Times = {**TIMES, "mla/wide": linear(0.1, 0.01, 5), "mla/packed": linear(0.2, 0.02, 9)}
    planner = _planner(policy_of(times))
    source = inspect.getsource(planner.extend)

    for arm, is_timed in (("mha/dense", True), ("mla/wide", True), ("mla/packed", False)):
        *_, least = planner.policies["fake"].fitted.models[arm][0].weights
        assert (repr(least) in source) is is_timed
    _same(planner, _extends(9))


def test_a_path_that_is_forbidden_is_not_compared_with() -> None:
    # One arm of the other path has no time, which would be asked for if dense were allowed.
    times = {arm: time for arm, time in TIMES.items() if arm != "mla/packed"}
    planner = _planner(policy_of(times))
    note = planner.extend.__globals__["held"]

    planner.extend(Batch.extend([4096], [64]))

    ((path, *_),) = note
    assert path == [*planner.question(Mode.EXTEND, "prefill_path")[1].choices].index("mla")
    _same(planner, _extends(11))


def test_regimes_in_which_the_same_is_asked_share_the_code_of_the_notes() -> None:
    formulas = FORMULAS._replace(regime="1 if prefix_tokens else 0", regimes=frozenset({0, 1}))
    point = replace(FAKE, formulas=lambda setting: formulas)
    planner = _planner(Policy.fit(point, SETTING, measured(TIMES)))

    assert inspect.getsource(planner.extend).count("note_prefill_path = ") == 1
    _same(planner, _extends(10))


def test_without_any_time_the_limits_of_the_baseline_s_choice_decide() -> None:
    planner = _planner(Policy.fit(FAKE, SETTING, ()), baseline=_always("mla"))

    source = inspect.getsource(planner.extend)

    assert "t_0" not in source
    _same(planner, _extends(11))


def test_the_source_stays_while_other_formulas_are_compiled() -> None:
    planner = _planner(policy_of(TIMES))
    source = inspect.getsource(planner.extend)

    for i in range(300):
        function_of(f"q_tokens > {i}")

    assert inspect.getsource(planner.extend) == source


def test_no_word_of_a_table_or_a_point_is_code() -> None:
    evil = "x'\"; import os #"
    arms = (Arm(evil, _never, frozenset(KVLayout)), Arm("y", _never, frozenset(KVLayout)))
    question = Question("prefill_path", {evil: (evil,), "y": ("y",)})
    point = replace(FAKE, arms=arms, questions=(question,))
    rows = [
        Measurement(FAKE.name, str(batch), arm.name, Status.OK, us, us, us, reason=evil)
        for batch in BATCHES
        for arm, us in zip(arms, (5.0, 7.0), strict=True)
    ]
    rows[-1] = replace(rows[-1], status=Status.FAILED, latency_us=None)
    planner = _planner(Policy.fit(point, SETTING, rows), baseline=_always(evil))

    assert planner.extend(BATCHES[3]).prefill_path == evil
    assert "import" not in inspect.getsource(planner.extend)


def test_the_weights_of_a_table_are_written_as_numbers() -> None:
    policy = policy_of(TIMES)
    models = [one for some in policy.fitted.models.values() for one in some.values()]
    source = inspect.getsource(_planner(policy).extend)

    numbers = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, float)
    }
    weights = {weight for model in models for weight in model.weights if weight}
    assert weights <= numbers
    assert numbers - weights == {1.01}


def test_a_weight_that_is_no_number_never_becomes_code() -> None:
    policy = policy_of(TIMES)
    model = replace(policy.fitted.models["mla/wide"][0], weights=("os.abort()", 0.0, 1.0))  # type: ignore[arg-type]
    policy.fitted.models["mla/wide"][0] = model  # type: ignore[index]

    with pytest.raises(TypeError, match="can't multiply sequence"):
        _planner(policy)
