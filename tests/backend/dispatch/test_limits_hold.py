"""No plan holds an arm whose guard says no: whatever the batch, table, limits and device."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.plan import Plan
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.libraries.limits import PROBED
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status

H100 = KNOWN["NVIDIA H100 80GB HBM3"]
EVERYTHING = {"sgl-flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.5.post1"}
LIBRARIES = [
    {},
    EVERYTHING,
    {"flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.0"},
    {"sglang-kernel": "0.4.4"},
    {"sgl-flash-mla": "9.9"},
]


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    arch = draw(st.sampled_from(["sm90", "sm90", "sm80", "sm100", "sm120", "cpu"]))
    device = replace(
        H100, arch=arch, memory=draw(st.sampled_from([2**33, 80 * 2**30])),
        shared_memory_optin=draw(st.sampled_from([0, 101376, 232448])),
    )  # fmt: skip
    names = draw(st.sets(st.sampled_from(sorted(PROBED))))
    profile = profile_of(draw(st.sampled_from(["deepseek-v3.2", "glm-5", "tiny"])))
    return Setting(
        profile,
        draw(st.sampled_from([1, profile.heads])),
        draw(st.sampled_from([KVLayout.BF16, KVLayout.FP8_PACKED])),
        device,
        draw(st.sampled_from(LIBRARIES)),
        max_chunk_kv=draw(st.sampled_from([4096, 131072])),
        limits={name: draw(st.integers(0, 50000)) for name in sorted(names)},
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    captured = draw(st.booleans())
    count = draw(st.sampled_from([1, 1, 3, 300]))
    size = st.integers(1, draw(st.sampled_from([64, 3000, 70000])))
    if draw(st.booleans()):
        news = [draw(size) for _ in range(min(count, 3))]
        prefixes = [draw(st.sampled_from([0, 1, 2047, 2048, 90000])) for _ in news]
        batch = Batch.extend(prefixes, news, captured=captured)
    else:
        next_n = draw(st.integers(1, 5))
        contexts = [draw(size) + next_n for _ in range(min(count, 3))] * max(count // 3, 1)
        make = draw(st.sampled_from([Batch.verify, Batch.draft_extend]))
        batch = make(contexts, next_n, captured=captured)
    return draw(st.sampled_from([batch, batch.sums]))


def policies(setting: Setting, seed: int) -> list[Policy]:
    """Policies of a made-up table: some arms on some batches, with times from 1 us to 1 s."""
    random = Random(seed)
    made = []
    for point in points_for(setting.profile):
        swept = point.grid(setting)[:: random.choice((9, 23, 1000))]
        rows = []
        for arm in point.arms:
            if random.random() < 0.8:
                for batch in swept:
                    us = 10 ** random.uniform(0, 6)
                    status = random.choices((Status.OK, Status.FAILED), (9, 1))[0]
                    rows.append(Measurement(point.name, str(batch), arm.name, status, us, us, us))
        made.append(Policy.fit(point, setting, rows))
    return made


def broken(plan: Plan, batch: Batch, setting: Setting) -> list[str]:
    """The fields of `plan` whose every kernel on this device is refused by its guards."""
    found = []
    for point in points_for(setting.profile):
        if batch.mode not in point.modes:
            continue
        candidates = {arm.name: arm for arm in point.candidates(setting)}
        for answer in point.questions:
            chosen = getattr(plan, answer.name)
            arms = [candidates[n] for n in answer.choices.get(chosen, ()) if n in candidates]
            if arms and all(arm.allowed(batch, setting) is not None for arm in arms):
                found.append(f"{answer.name} = {chosen}")
    return found


@given(settings_of(), batches(), st.integers(0, 10**6))
@settings(max_examples=120)
def test_no_plan_holds_an_arm_whose_guard_says_no(
    setting: Setting, batch: Batch, seed: int
) -> None:
    dispatcher = Dispatcher(setting, policies(setting, seed), source="made up")

    assert not broken(dispatcher.plan(batch), batch, setting)


@given(settings_of(), st.integers(1, 60000), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=30)
def test_no_captured_plan_holds_one_either(
    setting: Setting, size: int, next_n: int, seed: int
) -> None:
    assume(size * next_n * 2**17 < 2**31 or size * next_n <= 2**14)
    dispatcher = Dispatcher(setting, policies(setting, seed), source="made up")

    plan = dispatcher.captured(size, next_n)
    assert not broken(plan, plan.batch, setting)


def test_a_forbidden_arm_would_be_noticed() -> None:
    setting = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, H100, EVERYTHING)
    dispatcher = Dispatcher(setting, policies(setting, 1), source="made up")
    batch = Batch.extend([4096], [100])

    plan = replace(dispatcher.plan(batch), prefill_path="mha", mha_kernel="fa3")
    assert broken(plan, batch, setting) == ["prefill_path = mha", "mha_kernel = fa3"]
