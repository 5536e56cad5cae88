"""Verdicts: guards first, the winner last, ties to the stable default, doubt said as doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch import decide as module
from nsa_tune.backend.dispatch.decide import Choice, Verdict, decide, decide_for_all, pick
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Question
from nsa_tune.backend.types.records import Measurement, Status
from tests.backend.fake_point import (
    BATCHES,
    FAKE,
    SETTING,
    Times,
    linear,
    measured,
    policy_of,
)

PATH, SPARSE = FAKE.questions
COLOUR = Question("colour", {"red": ("mla/wide", "mla/plain"), "blue": ("mla/packed",)})
WARM = Batch.extend([512], [64])


def _times(mha: float, wide: float, packed: float) -> Times:
    """The same shape for all arms, so that their ratios are these everywhere."""
    base = linear(0.1, 0.02, 5)

    def scaled(factor: float) -> Callable[[Batch], float]:
        return lambda batch: factor * base(batch)

    return {"mha/dense": scaled(mha), "mla/wide": scaled(wide), "mla/packed": scaled(packed)}


def _decide(
    times: Times, batch: Batch = WARM, question: Question = PATH, default: str = "mha"
) -> Choice:
    return decide(question, policy_of(times), batch, default)


def test_a_clear_winner_wins() -> None:
    choice = _decide(_times(3, 2, 2.5))

    assert (choice.choice, choice.verdict) == ("mla", Verdict.WIN)
    assert choice.arms == {"mha": "mha/dense", "mla": "mla/wide"}
    assert choice.estimates["mha"].latency_us / choice.estimates["mla"].latency_us == (
        pytest.approx(1.5)
    )


def test_a_choice_costs_its_best_allowed_arm() -> None:
    times = _times(1.5, 2, 1)

    assert _decide(times).choice == "mla"
    # mla/packed takes at most 4096 rows: beyond, mla costs what mla/wide costs.
    many = Batch.extend([0] * 8, [1000] * 8)
    assert _decide(times, many).choice == "mha"
    assert _decide(times, many).arms["mla"] == "mla/wide"


@pytest.mark.parametrize(("default", "taken"), [("mha", "mha"), ("mla", "mla"), ("other", "mha")])
def test_a_tie_goes_to_the_baseline_or_else_to_the_first_declared(default: str, taken: str) -> None:
    for mha, mla in ((1, 1.009), (1.009, 1)):
        choice = _decide(_times(mha, mla, 2), default=default)
        assert (choice.choice, choice.verdict) == (taken, Verdict.TIE)
        assert choice.tied == ("mha", "mla")


def test_beyond_the_margin_there_is_no_tie() -> None:
    assert _decide(_times(1.02, 1, 2)).choice == "mla"
    assert _decide(_times(1, 1.02, 2)).choice == "mha"


def test_intervals_that_meet_leave_a_winner_unsure() -> None:
    rows = [
        replace(row, low_us=0.8 * row.latency_us, high_us=1.2 * row.latency_us)
        for row in measured(_times(1.1, 1, 2))
        if row.latency_us is not None
    ]
    choice = decide(PATH, Policy.fit(FAKE, SETTING, rows), BATCHES[14], "mha")

    assert (choice.choice, choice.verdict) == ("mla", Verdict.UNSURE)


def test_only_means_that_the_others_are_forbidden() -> None:
    choice = _decide(_times(1, 2, 2), Batch.extend([2048], [64]))

    assert (choice.choice, choice.verdict) == ("mla", Verdict.ONLY)
    assert choice.forbidden == {"mha": "too long for dense"}
    assert list(choice.estimates) == ["mla"]


def test_a_captured_batch_takes_mla_however_fast_mha_is() -> None:
    choice = _decide(_times(0.01, 2, 2), Batch.extend([0], [64], captured=True))

    assert (choice.choice, choice.verdict) == ("mla", Verdict.ONLY)
    assert choice.forbidden == {"mha": "not under capture"}


def test_a_layout_that_an_arm_does_not_read_is_named() -> None:
    setting = replace(SETTING, layout=KVLayout.BF16)
    policy = policy_of(_times(1, 2, 1), setting)

    choice = decide(SPARSE, policy, WARM, "wide")

    assert (choice.choice, choice.verdict) == ("wide", Verdict.ONLY)
    assert choice.forbidden == {"packed": "mla/packed does not read bf16 pools"}


def test_without_measurements_the_baseline_answers() -> None:
    choice = _decide({}, default="mla")

    assert (choice.choice, choice.verdict) == ("mla", Verdict.BASELINE)
    assert choice.estimates == {}


def test_a_baseline_that_is_forbidden_gives_way() -> None:
    many = Batch.extend([4000], [5000])
    times = {"mha/dense": linear(1, 1, 1)}

    choice = _decide(times, many, SPARSE, default="packed")

    assert choice.choice == "wide"
    assert choice.forbidden == {"packed": "more than 4096 rows"}


def test_a_baseline_gives_way_to_an_allowed_choice_out_of_several() -> None:
    three = Question("three", {"dense": ("mha/dense",), **SPARSE.choices})
    long = Batch.extend([4000], [500])

    choice = _decide({}, long, three, default="dense")

    assert (choice.choice, choice.verdict) == ("wide", Verdict.BASELINE)


def test_one_measured_choice_of_two_is_no_comparison() -> None:
    choice = _decide({"mla/wide": linear(1, 1, 1)}, default="mha")

    assert (choice.choice, choice.verdict) == ("mha", Verdict.BASELINE)


def test_a_baseline_may_name_a_kernel_that_no_arm_is_declared_for() -> None:
    assert _decide({}, WARM, SPARSE, "trtllm").choice == "trtllm"
    # But not once this device's own arms are measured.
    assert _decide(_times(1, 2, 1), WARM, SPARSE, "trtllm").choice == "packed"


def test_a_baseline_for_a_choice_without_an_arm_on_this_device_gives_way() -> None:
    setting = replace(SETTING, device=replace(SETTING.device, arch="sm100"))

    choice = decide(PATH, Policy.fit(FAKE, setting, ()), WARM, "mha")

    assert (choice.choice, choice.verdict) == ("mla", Verdict.ONLY)
    assert choice.forbidden == {"mha": "mha/dense has no kernels for sm100"}


def test_when_everything_is_forbidden_there_is_no_choice() -> None:
    packed_only = Question("packed_only", {"dense": ("mha/dense",), "packed": ("mla/packed",)})

    choice = _decide(_times(1, 2, 1), Batch.extend([0], [5000]), packed_only, "dense")

    assert (choice.choice, choice.verdict) == (None, Verdict.NONE)
    assert choice.forbidden == {"dense": "too long for dense", "packed": "more than 4096 rows"}


def test_an_arm_that_failed_is_forbidden_with_its_reason() -> None:
    rows = [row for row in measured(_times(2, 3, 1)) if row.arm != "mla/packed"]
    rows += [
        Measurement(FAKE.name, str(batch), "mla/packed", Status.FAILED, reason="no kernel image")
        for batch in BATCHES
    ]

    choice = decide(SPARSE, Policy.fit(FAKE, SETTING, rows), WARM, "packed")

    assert (choice.choice, choice.verdict) == ("wide", Verdict.ONLY)
    assert "no kernel image" in choice.forbidden["packed"]


_FACTOR = st.floats(0.2, 5.0)


@given(
    st.tuples(_FACTOR, _FACTOR, _FACTOR),
    st.integers(0, 9000),
    st.integers(1, 9000),
    st.booleans(),
    st.sampled_from(["mha", "mla", "wide", "packed", "trtllm"]),
)
@example((2.0402, 2.0402, 2.02), 1, 1, False, "packed")
@settings(max_examples=60, deadline=None)
def test_a_choice_is_always_allowed_and_never_beaten_by_more_than_the_margin(
    factors: tuple[float, float, float], prefix: int, new: int, captured: bool, default: str
) -> None:
    batch = Batch.extend([prefix], [new], captured=captured)
    policy = policy_of(_times(*factors))
    for question in (PATH, SPARSE, COLOUR):
        choice = decide(question, policy, batch, default)
        assert choice.choice is not None
        assert choice.choice in question.choices
        arm = FAKE.arm(choice.arms[choice.choice])
        assert arm.allowed(batch, SETTING) is None
        best = min(one.latency_us for one in choice.estimates.values())
        # Rounding decides where one is behind by the margin exactly.
        assert choice.estimates[choice.choice].latency_us <= 1.01 * best * (1 + 1e-6)
        assert set(choice.arms) | set(choice.forbidden) == set(question.choices)
        assert pick(question, policy.survey(batch), default)[0] == choice.choice


# --- one choice for many batches


def _sweep(new: int) -> list[Batch]:
    return [Batch.extend([prefix], [new]) for prefix in (256, 512, 1024)]


def _always(name: str) -> Callable[[Batch], str]:
    return lambda batch: name


def test_the_choice_for_all_has_the_least_mean_regret() -> None:
    # wide grows with kv, packed does not: 256 -> 2.6 against 6, 512 -> 5.2, 1024 -> 10.3.
    times = {"mla/wide": linear(0, 0.01, 0.001), "mla/packed": linear(0, 0, 6)}
    regret_wide = (10.3 / 6 - 1) / 3
    regret_packed = (6 / 2.6 - 1 + 6 / 5.2 - 1) / 3
    assert regret_wide < regret_packed

    choice = decide_for_all(SPARSE, policy_of(times), _sweep(1), _always("packed"))

    assert choice.choice == "wide"
    assert choice.estimates["packed"].latency_us == pytest.approx(6)


def test_a_choice_that_wins_everywhere_wins_for_all() -> None:
    choice = decide_for_all(SPARSE, policy_of(_times(9, 1, 2)), _sweep(8), _always("packed"))

    assert (choice.choice, choice.verdict) == ("wide", Verdict.WIN)


def test_equal_choices_tie_for_all() -> None:
    policy = policy_of(_times(9, 1, 1.001))

    choice = decide_for_all(SPARSE, policy, _sweep(8), _always("packed"))

    assert (choice.choice, choice.verdict) == ("packed", Verdict.TIE)


def test_a_choice_that_is_forbidden_on_one_batch_is_forbidden_for_all() -> None:
    batches = [*_sweep(64), Batch.extend([0], [5000])]

    choice = decide_for_all(SPARSE, policy_of(_times(9, 2, 1)), batches, _always("packed"))

    assert (choice.choice, choice.verdict) == ("wide", Verdict.ONLY)
    assert choice.forbidden == {"packed": "more than 4096 rows"}


def test_without_measurements_the_baseline_answers_for_all() -> None:
    choice = decide_for_all(SPARSE, policy_of({}), _sweep(8), _always("packed"))

    assert (choice.choice, choice.verdict) == ("packed", Verdict.BASELINE)


def test_for_a_single_batch_both_ways_of_deciding_agree() -> None:
    policy = policy_of(_times(1.3, 1, 2))
    for question, default in ((PATH, "mha"), (SPARSE, "packed"), (COLOUR, "blue")):
        one = decide(question, policy, WARM, default)
        every = decide_for_all(question, policy, [WARM], _always(default))
        assert (one.choice, one.verdict, one.arms, one.forbidden) == (
            every.choice,
            every.verdict,
            every.arms,
            every.forbidden,
        )


@pytest.mark.parametrize(
    ("taken_high_us", "other_low_us", "verdict"),
    [
        (100.0, 102.0, Verdict.WIN),
        (100.0, 101.5, Verdict.WIN),
        # Ahead, but by less than the margin at the far end of either interval.
        (100.0, 100.5, Verdict.UNSURE),
        (101.5, 102.0, Verdict.UNSURE),
        (100.8, 101.3, Verdict.UNSURE),
    ],
)
def test_a_win_is_one_at_the_far_ends_of_both_intervals(
    taken_high_us: float, other_low_us: float, verdict: Verdict
) -> None:
    taken = Estimate(100.0, 100.0, taken_high_us, False)
    other = Estimate(102.0, other_low_us, 102.0, False)

    found = module._confirmed("taken", [{"taken": taken, "other": other}], [1.0])

    assert found == (verdict, ())


def test_a_mean_of_estimates_is_extrapolated_where_any_is() -> None:
    inside, outside = Estimate(1.0, 1.0, 1.0, False), Estimate(4.0, 4.0, 4.0, True)

    assert module._mean_estimate([inside, outside], [0.5, 0.5]).extrapolated
    assert not module._mean_estimate([inside, inside], [0.5, 0.5]).extrapolated
