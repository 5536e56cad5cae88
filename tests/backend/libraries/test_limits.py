"""Hard limits: where exactly each begins, and that one which is unknown forbids."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.libraries.deep_gemm import limits as deep_gemm
from nsa_tune.backend.libraries.flash_mla import limits as flash_mla
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang import limits as sglang
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import limits
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Guard, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

_H100 = Device("NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20)
_LIBRARIES = {"flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.5.post1"}
_SETTING = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, _H100, _LIBRARIES)
_SLOW = replace(_SETTING, libraries={"sgl-flash-mla": "1.0.0"})
_ALL = tuple(
    guard
    for module in (deep_gemm, flash_mla, flashinfer, limits, sglang, sglang_kernel)
    for name in vars(module)
    if isinstance(guard := getattr(module, name), Guard)
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
    assert limits.DENSE_EXACT.check(Batch.extend([0], [2048]), _SETTING) is None
    reason = limits.DENSE_EXACT.check(Batch.extend([2048], [1]), _SETTING)
    assert reason == "dense attention equals sparse only up to 2048 kv tokens, 2049 given"


def test_dense_looks_at_the_longest_sequence_and_not_at_the_sum() -> None:
    assert limits.DENSE_EXACT.check(Batch.extend([0] * 9, [2048] * 9), _SETTING) is None
    assert limits.DENSE_EXACT.check(Batch.extend([0, 2048], [1, 1]), _SETTING) is not None


def test_the_chunk_capacity_bounds_the_sum() -> None:
    setting = replace(_SETTING, max_chunk_kv=1000)

    assert limits.CHUNK_CAPACITY.check(Batch.extend([400, 400], [100, 100]), setting) is None
    assert limits.CHUNK_CAPACITY.check(Batch.extend([400, 400], [100, 101]), setting) is not None


def test_dense_is_never_captured() -> None:
    assert limits.NOT_CAPTURED.check(Batch.extend([0], [8]), _SETTING) is None
    assert limits.NOT_CAPTURED.check(Batch.extend([0], [8], captured=True), _SETTING) is not None


@pytest.mark.parametrize(
    ("libraries", "limit"),
    [
        ({"sgl-flash-mla": "1.0.0"}, 19370),
        ({"flash-mla": "1.0.0"}, 11622),
        ({"sglang-kernel": "0.4.4"}, 11622),
        ({"vllm": "0.33.0"}, 11622),
        ({"sgl-flash-mla": "1.0.0", "vllm": "0.33.0"}, 19370),
        ({"sgl-flash-mla": "1.0.0", "flash-mla": "1.0.0"}, 19370),
    ],
)
def test_the_schedule_limit_depends_on_the_build(libraries: dict[str, str], limit: int) -> None:
    assert flash_mla.schedule_rows(replace(_SETTING, libraries=libraries)) == limit


def test_a_schedule_that_ends_the_process_is_forbidden_and_one_that_is_slow_is_not() -> None:
    assert _limit(flash_mla.FLASHMLA_SCHEDULE, _SETTING, 8, 40000) == 11622
    assert flash_mla.FLASHMLA_SCHEDULE.check(_rows(30000), _SLOW) is None


def test_a_slow_schedule_costs_time_for_each_row_behind_the_cliff_and_nothing_before() -> None:
    def surcharge(batch: Batch, setting: Setting) -> float:
        return flash_mla.schedule_surcharge(setting)(batch)

    alone = replace(_SLOW, layers=1)
    assert surcharge(_rows(19370), alone) == 0
    assert surcharge(_rows(19371), alone) == pytest.approx(6160, rel=0.01)
    assert surcharge(_rows(30000), alone) == pytest.approx(9540, rel=0.01)
    # The model's layers share it.
    assert surcharge(_rows(19370), _SLOW) == 0
    assert surcharge(_rows(30000), _SLOW) == pytest.approx(9540 / 61)
    assert surcharge(_rows(30000), replace(_SLOW, layers=10)) == pytest.approx(954)
    probed = replace(alone, limits={"flashmla_schedule_ns_per_row": 100})
    assert surcharge(_rows(30000), probed) == pytest.approx(3000)


def test_sglangs_own_schedule_stays_under_48_kib() -> None:
    b200 = Device("NVIDIA B200", "sm100", 132, 232448)
    setting = replace(_SETTING, device=b200, libraries={"sglang": "0.5.23"})

    assert flash_mla.schedule_rows(setting) == 2246
    assert flash_mla.schedule_rows(replace(setting, device=replace(b200, sms=148))) == 2220


@pytest.mark.parametrize(
    ("guard", "name", "formula"),
    [
        (flash_mla.FLASHMLA_SCHEDULE, "flashmla_schedule_rows", 11622),
        (flash_mla.FLASHMLA_OFFSETS, "flashmla_decode_rows", 32701),
        (deep_gemm.METADATA_ROWS, "deep_gemm_metadata_rows", 58112),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_smaller_of_formula_and_probe_counts(guard: Guard, name: str, formula: int) -> None:
    assert _limit(guard, _SETTING, 8, 2**21) == formula
    assert _limit(guard, replace(_SETTING, limits={name: formula - 9}), 8, 2**21) == formula - 9
    assert _limit(guard, replace(_SETTING, limits={name: formula + 9}), 8, 2**21) == formula


@pytest.mark.parametrize(
    ("version", "arch", "limit"),
    [
        ("0.1.0", "sm90", 14496),
        ("0.1.4", "sm90", 58112),
        ("0.1.5.post1", "sm90", 58112),
        ("0.2.5", "sm90", 58112),
        ("0.2.5", "sm100", 29056),
        ("0.0.9", "sm90", None),
        ("0.1.5", "sm80", None),
    ],
)
def test_the_metadata_rows_of_deep_gemm_depend_on_build_and_architecture(
    version: str, arch: str, limit: int | None
) -> None:
    setting = replace(
        _SETTING, device=replace(_H100, arch=arch), libraries={"sgl-deep-gemm": version}
    )

    assert deep_gemm.metadata_rows(setting) == limit
    assert (deep_gemm.METADATA_ROWS.check(_rows(8), setting) is None) == (limit is not None)


def test_a_probe_speaks_for_a_build_that_nobody_knows() -> None:
    limits = {"deep_gemm_metadata_rows": 5000, "flashmla_schedule_rows": 4000}
    setting = replace(_SETTING, libraries={"torch": "2.11.0"}, limits=limits)

    assert _limit(deep_gemm.METADATA_ROWS, setting, 8, 40000) == 5000
    assert _limit(flash_mla.FLASHMLA_SCHEDULE, setting, 8, 40000) == 4000


def test_kernels_take_the_shapes_that_they_were_built_for() -> None:
    tiny = replace(_SETTING, profile=profile_of("tiny"), heads=4)
    glm = replace(_SETTING, profile=profile_of("glm-5"), heads=64)
    shapes = (flash_mla.FLASHMLA_SHAPE, deep_gemm.MQA_SHAPE, flashinfer.RAGGED_SHAPE)

    for guard in shapes:
        assert guard.check(_rows(8), _SETTING) is None
        assert guard.check(_rows(8), glm) is None
        assert "tiny" in str(guard.check(_rows(8), tiny)) or "no" in str(
            guard.check(_rows(8), tiny)
        )
    assert limits.TRITON_SHAPE.check(_rows(8), tiny) is None
    assert flashinfer.TRTLLM_SPARSE_SHAPE.check(_rows(8), glm) is not None
    odd = replace(tiny, profile=replace(tiny.profile, rope=24))
    assert limits.TRITON_SHAPE.check(_rows(8), odd) is not None


def test_a_batch_without_queries_is_for_no_kernel() -> None:
    assert limits.SOME_ROWS.check(_rows(8), _SETTING) is None
    assert limits.SOME_ROWS.check(replace(_rows(8), q_tokens=0), _SETTING) is not None


@pytest.mark.parametrize(
    ("guard", "batch", "fits"),
    [
        # 8 GiB of scratch at 32701 rows of 128 heads; a quarter of 32 GiB is 8.
        (flash_mla.FLASHMLA_SCRATCH, Batch.extend([0], [32600]), 40),
        (flash_mla.SPARSE_FWD_BYTES, Batch.extend([0], [32600]), 40),
        (flash_mla.WIDENED_BYTES, Batch.extend([2**23], [1]), 40),
        (limits.SELECTION_BYTES, Batch.decode([4096] * 3640), 40),
        (limits.TRITON_BYTES, Batch.extend([0], [32600]), 40),
    ],
    ids=lambda value: value.name if isinstance(value, Guard) else "",
)
def test_what_an_arm_allocates_fits_a_quarter_of_the_memory(
    guard: Guard, batch: Batch, fits: int
) -> None:
    setting = replace(_SETTING, device=replace(_H100, memory=fits * 2**30))

    assert guard.check(batch, setting) is None
    assert "GiB" in str(guard.check(batch, replace(setting, device=replace(_H100, memory=2**34))))


def test_a_bf16_pool_is_not_widened() -> None:
    setting = replace(_SETTING, layout=KVLayout.BF16, device=replace(_H100, memory=2**30))

    assert flash_mla.WIDENED_BYTES.check(Batch.extend([2**23], [1]), setting) is None


def test_trtllms_workspace_bounds_sequences_times_the_longest() -> None:
    few, many = Batch.extend([0] * 32, [2048] * 32), Batch.extend([0] * 512, [2048] * 512)

    assert flashinfer.TRTLLM_RAGGED_WORKSPACE.check(few, _SETTING) is None
    assert "MiB of workspace" in str(flashinfer.TRTLLM_RAGGED_WORKSPACE.check(many, _SETTING))


def test_an_unknown_build_or_device_forbids_flashmla_kv() -> None:
    unknown_build = replace(_SETTING, libraries={"torch": "2.13.0"})
    unknown_device = replace(_SETTING, device=Device("New GPU", "sm90"))

    assert "no known build" in str(flash_mla.FLASHMLA_SCHEDULE.check(_rows(8), unknown_build))
    assert flash_mla.FLASHMLA_SCHEDULE.check(_rows(8), unknown_device) is not None


@pytest.mark.parametrize(
    ("heads", "limit"), [(128, 32767 - 66), (64, 65535 - 132), (16, 65535 - 132)]
)
def test_the_split_offsets_of_flashmla_fit_int32(heads: int, limit: int) -> None:
    setting = replace(_SETTING, heads=heads)

    assert _limit(flash_mla.FLASHMLA_OFFSETS, setting, 8, 100000) == limit


def test_the_index_offsets_of_sparse_fwd_fit_int32() -> None:
    assert _limit(flash_mla.SPARSE_FWD_OFFSETS, _SETTING, 8, 2**21) == 2**20 - 1


@pytest.mark.parametrize("guard", [flash_mla.FLASHMLA_OFFSETS, flash_mla.SPARSE_FWD_OFFSETS])
def test_flashmla_computes_at_most_128_heads(guard: Guard) -> None:
    assert "at most 128 heads" in str(guard.check(_rows(8), replace(_SETTING, heads=256)))


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_what_flashmla_computes(heads: int, padded: int) -> None:
    assert flash_mla.padded_heads(heads) == padded


def test_topk_must_be_a_multiple_of_the_kernels_block() -> None:
    guard = flash_mla.multiple_of_topk(128, "some kernel", "made up")
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
        if deep_gemm.NEXT_N_SM90.check(Batch.verify([64], next_n), setting) is None
    }
    assert taken == allowed


def test_logits_may_take_a_quarter_of_the_memory() -> None:
    setting = replace(_SETTING, device=replace(_H100, memory=4 * 2**20))

    # One MiB is 256 rows of 1024 fp32 logits; a row is padded to 256 of them.
    assert deep_gemm.MQA_LOGITS_BYTES.check(Batch.verify([1000] * 128, 2), setting) is None
    assert deep_gemm.MQA_LOGITS_BYTES.check(Batch.verify([1025] * 128, 2), setting) is not None


@given(
    memory=st.integers(1, 2**41),
    q_tokens=st.integers(1, 2**20),
    more=st.integers(0, 2**20) | st.integers(0, 2**31 - 2**21),
)
@example(memory=85_017_493_504, q_tokens=72_638, more=0)
@example(memory=85_017_493_504, q_tokens=72_894, more=0)
def test_logits_are_as_many_whole_tiles_as_keys_need(memory: int, q_tokens: int, more: int) -> None:
    setting = replace(_SETTING, device=replace(_H100, memory=memory))
    batch = Batch.extend([more], [q_tokens]).sums
    tiles = memory // 4 // 1024

    paged = deep_gemm.MQA_LOGITS_BYTES.check(batch, setting)
    ragged = deep_gemm.RAGGED_LOGITS_BYTES.check(batch, setting)

    assert (paged is None) == (q_tokens * ((batch.max_kv + 255) // 256) <= tiles)
    assert (ragged is None) == (q_tokens * ((batch.kv_tokens + 511) // 256) <= tiles)


# FA3's plan holds less above 4096 tiles, where one schedule serves all heads. A longer batch has
# something to select.
_MONOTONE = [g for g in _ALL if g not in (flashinfer.FA3_WORKS, limits.NOTHING_TO_SELECT)]


@pytest.mark.parametrize("guard", _MONOTONE, ids=lambda guard: guard.name)
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
    b200 = replace(b200, libraries={"sgl-flash-mla": "1.0.0"})
    newer = replace(_SETTING, libraries={"sgl-flash-mla": "9.9.9"})

    assert flash_mla.FLASHMLA_SCHEDULE.check(_rows(14527), b200) is None
    assert "limit of 14527" in str(flash_mla.FLASHMLA_SCHEDULE.check(_rows(14528), b200))
    assert "no known build" in str(flash_mla.FLASHMLA_SCHEDULE.check(_rows(8), newer))


def test_more_work_items_than_flashinfer_plans_for_are_refused() -> None:
    assert flashinfer.FA2_WORKS.check(Batch.extend([0] * 64, [2048] * 64), _SETTING) is None
    assert flashinfer.FA2_WORKS.check(Batch.extend([0], [2**21]), _SETTING) is not None
    assert flashinfer.FA3_WORKS.check(Batch.extend([0] * 64, [2048] * 64), _SETTING) is None
    assert "work items" in str(
        flashinfer.FA3_WORKS.check(Batch.extend([0] * 3000, [32] * 3000), _SETTING)
    )


@given(
    heads=st.sampled_from([1, 8, 16, 32, 64, 128]),
    batch_size=st.integers(1, 2**20),
    more=st.integers(0, 2**21),
)
@example(heads=128, batch_size=338_938, more=0)
@example(heads=128, batch_size=338_939, more=0)
def test_plans_of_flashinfer_must_fit_their_workspace(
    heads: int, batch_size: int, more: int
) -> None:
    setting = replace(_SETTING, heads=heads)
    q_tokens = batch_size + more
    batch = Batch.from_totals(
        mode="extend", batch_size=batch_size, q_tokens=q_tokens, kv_tokens=q_tokens,
        max_kv=more + 1, pairs=q_tokens,
    )  # fmt: skip
    tiles = q_tokens // 128 + batch_size
    most = (8 * 2**20 - 4 * 133 - 128) // 28
    numbers = 3 * (q_tokens // 16 + batch_size) + q_tokens + 2 * (batch_size + 1)

    fa3 = flashinfer.FA3_WORKS.check(batch, setting)
    fa2 = flashinfer.FA2_WORKS.check(batch, setting)

    assert (fa3 is None) == (tiles * (heads if tiles <= 4097 else 1) <= most)
    assert (fa2 is None) == (4 * numbers <= 8 * 2**20)


@pytest.mark.parametrize(
    ("model", "heads", "allowed"),
    [
        ("deepseek-v3.2", 128, True), ("deepseek-v3.2", 8, True), ("glm-5", 64, True),
        ("tiny", 4, False), ("deepseek-v3.2", 256, False),
    ],
)  # fmt: skip
def test_fa3_over_a_selection_is_built_for_one_width_and_up_to_128_heads(
    model: str, heads: int, allowed: bool
) -> None:
    setting = replace(_SETTING, profile=profile_of(model), heads=heads)
    reason = sglang_kernel.FA3_SPARSE_SHAPE.check(_rows(8), setting)

    assert (reason is None) == allowed
    assert allowed or f"{heads} heads" in str(reason)


@pytest.mark.parametrize(
    ("heads", "most"), [(128, 32767), (16, 262143), (4, 1048575), (1, 1048575)]
)
def test_fa3_over_a_selection_ends_where_an_int32_offset_does(heads: int, most: int) -> None:
    # Of the output (heads * 512 a row) or of the page table (2048 a row), whichever is wider.
    setting = replace(_SETTING, heads=heads)

    assert _limit(sglang_kernel.FA3_SPARSE_OFFSETS, setting, 8, 2**21) == most
    assert most * max(heads * 512, 2048) < 2**31 <= (most + 1) * max(heads * 512, 2048)


@pytest.mark.parametrize(
    ("model", "heads", "fit"),
    [
        ("deepseek-v3.2", 128, True), ("deepseek-v3.2", 16, True), ("deepseek-v3.2", 96, False),
        ("deepseek-v3.2", 48, False), ("deepseek-v3.2", 256, False), ("tiny", 4, False),
    ],
)  # fmt: skip
def test_sglangs_fp8_kernel_takes_these_heads_and_widths(model: str, heads: int, fit: bool) -> None:
    setting = replace(_SETTING, profile=profile_of(model), heads=heads)

    reason = sglang.Q8_SHAPE.check(_rows(8), setting)
    assert (reason is None) == fit
    assert fit or f"{heads} heads" in str(reason)


@pytest.mark.parametrize(
    ("heads", "fit"), [(4, True), (8, True), (16, False), (32, False), (24, False)]
)
def test_a_union_of_four_takes_the_heads_that_fill_16_or_32_rows(heads: int, fit: bool) -> None:
    setting = replace(_SETTING, heads=heads)

    assert all(guard.check(_rows(8), setting) is None for guard in sglang.TRITON)
    assert (sglang.UNION_ROWS.check(_rows(8), setting) is None) == fit


def test_sglangs_triton_kernel_takes_up_to_32_heads_of_512_and_64_channels() -> None:
    shape = sglang.TRITON[0]

    assert "64 heads" in str(shape.check(_rows(8), replace(_SETTING, heads=64)))
    tiny = replace(_SETTING, profile=profile_of("tiny"), heads=4)
    assert "128 + 32" in str(shape.check(_rows(8), tiny))


def test_the_fp8_kernel_ends_where_an_int32_offset_of_indices_does() -> None:
    assert _limit(sglang.Q8_OFFSETS, _SETTING, 8, 2**21) == 1048575


def test_the_fp8_kernel_s_operands_keep_to_a_quarter_of_the_memory() -> None:
    memory = _SETTING.device.memory
    row_bytes = 128 * (2 * 512 + 576 + 2 * 512 + 8)
    setting = replace(_SETTING, heads=128)

    assert _limit(sglang.Q8_BYTES, setting, 8, 2**21) == memory // 4 // row_bytes
    many = Batch.extend([memory // 4 // 576], [8])
    assert "GiB of gathered fp8 latents" in str(sglang.Q8_BYTES.check(many, setting))


def test_splitting_a_selection_is_for_few_rows() -> None:
    assert _limit(limits.FEW_ROWS, _SETTING, 8, 4096) == 64
    assert limits.FEW_ROWS.check(Batch.decode([9] * 65), _SETTING) == (
        "65 rows pass the 64 that splitting each row's selection is made for"
    )


def test_what_the_guards_let_through_sglangs_unions_take() -> None:
    """As `_union_path` of 0.5.22 and 0.5.23 has it: rows of a program, keys, and a whole four."""
    random, allowed = Random(4), 0
    for _ in range(2000):
        profile = replace(_SETTING.profile, index_topk=random.choice((512, 1536, 2048)))
        heads, rows = random.choice((1, 2, 4, 6, 8, 12, 16, 32, 64)), random.randrange(1, 12)
        setting = replace(_SETTING, heads=heads, profile=profile)
        if all(
            guard.check(Batch.extend([3000], [rows]), setting) is None
            for guard in (*sglang.TRITON, sglang.UNION_ROWS)
        ):
            allowed += 1
            assert 4 * heads in (16, 32)
            assert not profile.index_topk & (profile.index_topk - 1)
            assert rows >= 4
    assert allowed > 50
