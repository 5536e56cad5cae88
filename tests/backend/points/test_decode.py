"""The decode point: its arms agree with the reference, and its batches span what engines decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels import split_sparse_mla
from nsa_tune.backend.kernels.packed_fp8 import dequantize_reference
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.attention_case import prefill_case
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

DECODE = POINTS["decode"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H100 = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H100 80GB HBM3"],
    {"sgl-flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.5.post1"},
)  # fmt: skip
FEATURES = DECODE.features(H100)
BATCHES = [
    Batch.decode([5]),
    Batch.decode([300, 129, 64]),
    Batch.verify([40, 700], 2),
    Batch.draft_extend([500], 4),
]


def runs() -> Iterator[tuple[KVLayout, Batch, str]]:
    for layout in (KVLayout.BF16, KVLayout.FP8_PACKED):
        names = [arm.name for arm in DECODE.arms if arm.reference and layout in arm.layouts]
        for batch in BATCHES:
            for name in [*names, "triton"]:
                yield layout, batch, name


@pytest.mark.parametrize(("layout", "batch", "name"), list(runs()), ids=str)
def test_every_arm_computes_the_reference(layout: KVLayout, batch: Batch, name: str) -> None:
    case = prefill_case(batch, replace(TINY, layout=layout), CPU)
    output = DECODE.arm(name).build(case)()

    assert output.shape == (batch.q_tokens, 4, 32)
    assert case.error_of(output) < case.tolerance


def attend(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float
) -> torch.Tensor:
    """What a sparse kernel computes, for the library's edge in these tests."""
    return sparse_mla_reference(q, latents, indices, scale, 128)


def test_flashmla_sparse_reads_a_gather_whose_size_does_not_depend_on_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def forward(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, length: torch.Tensor
    ) -> torch.Tensor:
        del length
        seen.append((q.shape[1], kv.shape[0], indices.shape))
        return attend(q, kv[:, 0], indices[:, 0], scale)

    monkeypatch.setattr(flash_mla, "sparse_forward", forward)
    for context in (100, 900):
        case = prefill_case(Batch.verify([context, 77], 2), TINY, CPU)
        out = DECODE.arm("flashmla_sparse").build(case)()
        assert case.error_of(out) < case.tolerance
    # Heads are padded to 64, and 4 rows of 128 selected tokens are gathered.
    assert seen == [(64, 512, (4, 1, 128))] * 2


def test_trtllm_gets_pages_slots_and_the_lengths_before_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}

    def decode(**arguments: object) -> torch.Tensor:
        given.update(arguments)
        q, pool, indices = (arguments[name] for name in ("query", "kv_cache", "block_tables"))
        assert isinstance(q, torch.Tensor)
        assert isinstance(pool, torch.Tensor)
        assert isinstance(indices, torch.Tensor)
        return attend(q[:, 0], pool.flatten(0, 2), indices[:, 0], case.profile.softmax_scale)[
            :, None
        ]

    class Module:
        trtllm_batch_decode_with_kv_cache_mla = staticmethod(decode)

    monkeypatch.setattr(flashinfer, "_module", lambda name: Module)
    case = prefill_case(Batch.verify([700, 40], 2), replace(TINY, layout=KVLayout.BF16), CPU)
    out = DECODE.arm("trtllm").build(case)()

    assert case.error_of(out) < case.tolerance
    assert given["sparse_mla_top_k"] == 128
    assert given["max_seq_len"] == 700
    lens = given["seq_lens"]
    assert isinstance(lens, torch.Tensor)
    assert lens.tolist() == [699, 700, 39, 40]
    pool = given["kv_cache"]
    assert isinstance(pool, torch.Tensor)
    assert pool.shape[1:] == (1, 16, 160)


@pytest.mark.parametrize("setting", [H100, TINY], ids=["H100", "tiny"])
def test_the_grid_spans_batch_context_and_next_n_with_uneven_contexts(setting: Setting) -> None:
    grid = DECODE.grid(setting)
    topk = setting.profile.index_topk

    assert 50 <= len(grid) <= 180
    assert len({str(batch) for batch in grid}) == len(grid)
    assert {batch.next_n for batch in grid} == {1, 2, 4}
    assert {batch.batch_size for batch in grid} >= {1, 4, 16, 64}
    assert {batch.q_tokens for batch in grid} >= {5, 6, 7, 10, 12, 20, 40}
    assert max(batch.max_kv for batch in grid) >= 56 * topk
    assert any(len(set(batch.lens or ())) == 3 for batch in grid)
    assert sum(len(set(batch.lens or ())) > 3 for batch in grid) >= len(grid) // 20
    assert any(batch.max_kv < topk / 2 for batch in grid)
    assert sum(batch.max_kv % 64 > 0 for batch in grid) >= len(grid) // 2


def test_samples_are_seeded_and_half_of_them_ragged() -> None:
    random = Random(5)
    drawn = [DECODE.sample(H100, random) for _ in range(100)]

    assert drawn[0] == DECODE.sample(H100, Random(5))
    assert 20 < sum(len(set(batch.lens or ())) > 1 for batch in drawn) < 80


def test_sums_of_equal_sequences_cost_what_their_lengths_cost() -> None:
    lengths = Batch.verify([5000] * 6, 2)
    sums = Batch.from_totals(
        mode="target_verify", q_tokens=12, kv_tokens=30000, max_kv=5000, batch_size=6
    )

    assert FEATURES.features(sums) == pytest.approx(FEATURES.features(lengths))
    assert FEATURES.coordinates(sums) == pytest.approx(FEATURES.coordinates(lengths))


def test_flashmla_s_sparse_kernel_computes_whole_steps_of_128_keys() -> None:
    equal = FEATURES.by_name(Batch.decode([515] * 251))
    assert equal["step_pairs"] == 251 * 640
    # 66 queries at a time: 251 of them are 3.8 waves.
    assert equal["makespan_keys"] == 4 * 640

    full = FEATURES.by_name(Batch.decode([3000] * 4))
    assert full["step_pairs"] == full["attended_pairs"] == 4 * 2048

    # Half a step for each row, but only as many as are missing half of their keys.
    ragged = FEATURES.by_name(Batch.decode([300, 515, 700]))
    assert ragged["step_pairs"] == 1515 + 3 * 64
    one_short = FEATURES.by_name(Batch.decode([1024, *[5000] * 9]))
    assert one_short["step_pairs"] == 1024 + 9 * 2048 + 64


def test_queries_side_by_side_take_as_long_as_the_longest() -> None:
    """Three of them: seen on an H100 with contexts of 296, 1411 and 364 tokens."""
    assert FEATURES.by_name(Batch.decode([296, 1411, 364]))["makespan_keys"] == 1536
    assert FEATURES.by_name(Batch.decode([690] * 3))["makespan_keys"] == 768


def fa3_sparse(
    q_nope: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor,
    lengths: torch.Tensor, starts: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention-3's contract: the leading indices count, and are read unchecked."""
    counts = torch.arange(indices.shape[1]) < lengths[:, None]
    assert bool((indices[counts] >= 0).all())
    assert starts.tolist() == list(range(len(lengths) + 1))
    assert q_nope.stride(-1) == q_rope.stride(-1) == 1
    chosen = torch.where(counts, indices, -1)
    return sparse_mla_reference(torch.cat((q_nope, q_rope), -1), pool, chosen, scale, 128)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", ["fa3", "triton_split"])
def test_an_arm_over_a_bf16_pool_passes_what_its_kernel_reads(
    batch: Batch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_kernel, "fa3_sparse", fa3_sparse)
    monkeypatch.setattr(split_sparse_mla, "split_sparse_mla", sparse_mla_reference)
    case = prefill_case(batch, replace(TINY, layout=KVLayout.BF16), CPU)
    output = DECODE.arm(name).build(case)()

    assert output.shape == (batch.q_tokens, 4, 32)
    assert case.error_of(output) < case.tolerance


def sparse_decode(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, schedule: object
) -> torch.Tensor:
    """FlashMLA's contract: q [rows, queries a row, heads, width], indices alike."""
    assert schedule is not None and q.shape[:2] == indices.shape[:2]
    flat = pool.view(torch.uint8).flatten(0, 2)
    latents = dequantize_reference(flat, torch.arange(len(flat)), 128, 32)
    out = sparse_mla_reference(q.flatten(0, 1), latents, indices.flatten(0, 1), scale, 128)
    by_row: torch.Tensor = out.unflatten(0, q.shape[:2])
    return by_row


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", ["flashmla_kv", "flashmla_kv_grouped"])
def test_flashmla_reads_the_packed_pool_in_rows_of_either_shape(
    batch: Batch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def kernel(q: torch.Tensor, *more: Any) -> torch.Tensor:
        shapes.append(q.shape[:2])
        return sparse_decode(q, *more)

    monkeypatch.setattr(flash_mla, "sparse_decode", kernel)
    monkeypatch.setattr(flash_mla, "new_schedule", object)
    case, arm = prefill_case(batch, TINY, CPU), DECODE.arm(name)
    assert arm.first is not None
    for build in (arm.build, arm.first):
        assert case.error_of(build(case)()) < case.tolerance

    rows = batch.batch_size if name == "flashmla_kv_grouped" else batch.q_tokens
    assert shapes == [(rows, batch.q_tokens // rows)] * 2


def test_rows_of_one_query_are_not_measured_twice() -> None:
    arm = DECODE.arm("flashmla_kv_grouped")
    setting = replace(H100, libraries={"sgl-flash-mla": "1.0.0"})

    assert arm.allowed(Batch.decode([5000]), setting) == (
        "with next_n 1 flashmla_kv_grouped is flashmla_kv itself"
    )
    assert arm.allowed(Batch.verify([5000], 2), setting) is None


def test_only_the_arms_with_a_schedule_have_a_cost_of_a_pass() -> None:
    assert [arm.name for arm in DECODE.arms if arm.first is not None] == [
        "flashmla_kv", "flashmla_kv_grouped",
    ]  # fmt: skip


def test_a_layer_reads_the_schedule_of_its_pass_and_the_first_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def kernel(
        q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, schedule: object
    ) -> torch.Tensor:
        given.append(schedule)
        return q[..., :128]

    monkeypatch.setattr(flash_mla, "sparse_decode", kernel)
    monkeypatch.setattr(flash_mla, "new_schedule", object)
    arm, case = DECODE.arm("flashmla_kv"), prefill_case(BATCHES[1], TINY, CPU)
    assert arm.first is not None
    later, first = arm.build(case), arm.first(case)
    for run in (later, later, first, first):
        assert run().shape == (3, 4, 32)

    assert given[0] is given[1]
    assert len({id(one) for one in given}) == 3
