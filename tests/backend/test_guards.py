"""Hard limits: where exactly each begins, and that one which is unknown forbids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend import guards
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Guard, Setting
from nsa_tune.backend.profiles import profile_of
from nsa_tune.backend.records import Device

_H100 = Device("NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20)
_SETTING = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, _H100, {"sgl-flash-mla": "1.0.0"}
)
_ALL = (
    guards.CHUNK_CAPACITY,
    guards.DENSE_EXACT,
    guards.FLASHMLA_OFFSETS,
    guards.FLASHMLA_SCHEDULE,
    guards.MQA_LOGITS_BYTES,
    guards.NEXT_N_SM90,
    guards.NOT_CAPTURED,
    guards.SPARSE_FWD_OFFSETS,
)


def _rows(count: int) -> Batch:
    return Batch.extend([0] * 8, [count // 8] * 7 + [count - count // 8 * 7])


def _limit(guard: Guard, setting: Setting, low: int, high: int) -> int:
    """The most rows in low..high that `guard` allows, by bisection."""
    assert guard.check(_rows(low), setting) is None
    assert guard.check(_rows(high), setting) is not None
    while high - low > 1:
        middle = (low + high) // 2
        if guard.check(_rows(middle), setting) is None:
            low = middle
        else:
            high = middle
    return low


def test_dense_is_exact_up_to_index_topk() -> None:
    assert guards.DENSE_EXACT.check(Batch.extend([0], [2048]), _SETTING) is None
    reason = guards.DENSE_EXACT.check(Batch.extend([2048], [1]), _SETTING)
    assert reason == "dense attention equals sparse only up to 2048 kv tokens, 2049 given"


def test_dense_looks_at_the_longest_sequence_and_not_at_the_sum() -> None:
    assert guards.DENSE_EXACT.check(Batch.extend([0] * 9, [2048] * 9), _SETTING) is None
    assert guards.DENSE_EXACT.check(Batch.extend([0, 2048], [1, 1]), _SETTING) is not None


def test_the_chunk_capacity_bounds_the_sum() -> None:
    setting = replace(_SETTING, max_chunk_kv=1000)

    assert guards.CHUNK_CAPACITY.check(Batch.extend([400, 400], [100, 100]), setting) is None
    assert guards.CHUNK_CAPACITY.check(Batch.extend([400, 400], [100, 101]), setting) is not None


def test_dense_is_never_captured() -> None:
    assert guards.NOT_CAPTURED.check(Batch.extend([0], [8]), _SETTING) is None
    assert guards.NOT_CAPTURED.check(Batch.extend([0], [8], captured=True), _SETTING) is not None


@pytest.mark.parametrize(
    ("libraries", "limit"),
    [
        ({"sgl-flash-mla": "1.0.0"}, 19370),
        ({"flash-mla": "1.0.0"}, 11622),
        ({"sglang-kernel": "0.4.4"}, 11622),
        ({"sgl-flash-mla": "1.0.0", "flash-mla": "1.0.0"}, 19370),
    ],
)
def test_the_schedule_limit_depends_on_the_build(libraries: dict[str, str], limit: int) -> None:
    setting = replace(_SETTING, libraries=libraries)

    assert _limit(guards.FLASHMLA_SCHEDULE, setting, 8, 40000) == limit


def test_an_unknown_build_or_device_forbids_flashmla_kv() -> None:
    unknown_build = replace(_SETTING, libraries={"torch": "2.13.0"})
    unknown_device = replace(_SETTING, device=Device("New GPU", "sm90"))

    assert "no known build" in str(guards.FLASHMLA_SCHEDULE.check(_rows(8), unknown_build))
    assert guards.FLASHMLA_SCHEDULE.check(_rows(8), unknown_device) is not None


@pytest.mark.parametrize(
    ("heads", "limit"), [(128, 32767 - 66), (64, 65535 - 132), (16, 65535 - 132)]
)
def test_the_split_offsets_of_flashmla_fit_int32(heads: int, limit: int) -> None:
    setting = replace(_SETTING, heads=heads)

    assert _limit(guards.FLASHMLA_OFFSETS, setting, 8, 100000) == limit


def test_the_index_offsets_of_sparse_fwd_fit_int32() -> None:
    assert _limit(guards.SPARSE_FWD_OFFSETS, _SETTING, 8, 2**21) == 2**20 - 1


@pytest.mark.parametrize("guard", [guards.FLASHMLA_OFFSETS, guards.SPARSE_FWD_OFFSETS])
def test_flashmla_computes_at_most_128_heads(guard: Guard) -> None:
    assert "at most 128 heads" in str(guard.check(_rows(8), replace(_SETTING, heads=256)))


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_what_flashmla_computes(heads: int, padded: int) -> None:
    assert guards.padded_heads(heads) == padded


def test_topk_must_be_a_multiple_of_the_kernels_block() -> None:
    guard = guards.multiple_of_topk(128, "some kernel", "made up")
    odd = replace(_SETTING.profile, index_topk=2112)

    assert guard.check(_rows(8), _SETTING) is None
    reason = guard.check(_rows(8), replace(_SETTING, profile=odd))
    assert reason == "some kernel needs topk % 128 == 0, got 2112"


@pytest.mark.parametrize(("arch", "allowed"), [("sm90", {1, 2}), ("sm100", {1, 2, 3, 4})])
def test_deep_gemm_takes_next_n_1_or_2_on_sm90(arch: str, allowed: set[int]) -> None:
    setting = replace(_SETTING, device=replace(_H100, arch=arch))

    taken = {
        next_n
        for next_n in (1, 2, 3, 4)
        if guards.NEXT_N_SM90.check(Batch.verify([64], next_n), setting) is None
    }
    assert taken == allowed


def test_logits_may_take_a_quarter_of_the_memory() -> None:
    setting = replace(_SETTING, device=replace(_H100, memory=4 * 2**20))

    # One MiB is 256 rows of 1024 fp32 logits; a row is padded to 256 of them.
    assert guards.MQA_LOGITS_BYTES.check(Batch.verify([1000] * 128, 2), setting) is None
    assert guards.MQA_LOGITS_BYTES.check(Batch.verify([1025] * 128, 2), setting) is not None


@pytest.mark.parametrize("guard", _ALL, ids=lambda guard: guard.name)
@given(
    st.lists(st.tuples(st.integers(0, 300000), st.integers(1, 300000)), min_size=1, max_size=4),
    st.integers(1, 300000),
)
@settings(max_examples=30)
def test_what_is_forbidden_stays_forbidden_when_a_batch_grows(
    guard: Guard, lens: list[tuple[int, int]], more: int
) -> None:
    batch = Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])
    grown = Batch.extend([prefix for prefix, _ in lens], [new + more for _, new in lens])

    if guard.check(batch, _SETTING) is not None:
        assert guard.check(grown, _SETTING) is not None


@pytest.mark.parametrize("guard", _ALL, ids=lambda guard: guard.name)
def test_every_limit_names_its_kind_and_its_source(guard: Guard) -> None:
    assert guard.kind in {"formula", "probe", "semantic"}
    assert guard.source


def test_a_build_of_another_version_or_architecture_has_a_limit_of_its_own_or_none() -> None:
    b200 = replace(_SETTING, device=replace(_SETTING.device, arch="sm100"))
    newer = replace(_SETTING, libraries={"sgl-flash-mla": "9.9.9"})

    assert guards.FLASHMLA_SCHEDULE.check(_rows(14527), b200) is None
    assert "limit of 14527" in str(guards.FLASHMLA_SCHEDULE.check(_rows(14528), b200))
    assert "no known build" in str(guards.FLASHMLA_SCHEDULE.check(_rows(8), newer))


def test_more_work_items_than_fa3_plans_for_are_refused() -> None:
    assert guards.FA3_WORKS.check(Batch.extend([0] * 64, [2048] * 64), _SETTING) is None
    assert "work items" in str(
        guards.FA3_WORKS.check(Batch.extend([0] * 3000, [32] * 3000), _SETTING)
    )
