"""The prefill point: its arms agree, its guards hold, its batches cover both regimes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError, UnknownName
from nsa_tune.autotune.bench.measure import measure_batch
from nsa_tune.autotune.bench.timing import timer_for
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang import calls as sglang
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel
from nsa_tune.backend.points import LOSSY, POINTS, lossy_named
from nsa_tune.backend.points.attention_case import PrefillCase, prefill_case
from nsa_tune.backend.points.prefill.features import union_keys
from nsa_tune.backend.types.layouts import NOT_SGLANGS, SGLANGS_TRITON, KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Status
from tests.backend.points.test_decode import fa3_sparse

PREFILL = POINTS["prefill"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H100 = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H100 80GB HBM3"],
    {"sgl-flash-mla": "1.0.0"},
)  # fmt: skip
FEATURES = PREFILL.features(H100)
BATCHES = [
    Batch.extend([0], [1]),
    Batch.extend([0], [128]),
    Batch.extend([96], [32]),
    Batch.extend([0, 100, 7], [33, 1, 64]),
    Batch.extend([0], [300]),
    Batch.extend([500, 3], [40, 9]),
]


def runs() -> Iterator[tuple[KVLayout, Batch, str]]:
    for layout in (KVLayout.BF16, KVLayout.FP8_PACKED):
        setting = replace(TINY, layout=layout)
        for batch in BATCHES:
            for arm in PREFILL.candidates(setting):
                if arm.allowed(batch, setting) is None:
                    yield layout, batch, arm.name


@pytest.mark.parametrize(("layout", "batch", "name"), list(runs()), ids=str)
def test_every_arm_computes_the_reference(layout: KVLayout, batch: Batch, name: str) -> None:
    case = prefill_case(batch, replace(TINY, layout=layout), CPU)
    output = PREFILL.arm(name).build(case)()

    assert output.shape == (batch.q_tokens, 4, 32)
    assert case.error_of(output) < case.tolerance


def test_local_heads_are_padded_inside_an_arm_and_cut_off_again() -> None:
    case = prefill_case(BATCHES[3], replace(TINY, heads=2), CPU)

    assert PREFILL.arm("mla/torch_kv").build(case)().shape == (98, 2, 32)


def wrong(case: PrefillCase, row: int, factor: float) -> torch.Tensor:
    output = PREFILL.arm("mla/torch_kv").build(case)().clone()
    output[row] *= factor
    return output


@pytest.mark.parametrize("row", [0, 32, 33, 97])
def test_a_wrong_row_at_the_edge_of_a_sequence_is_noticed(row: int) -> None:
    case = prefill_case(BATCHES[3], TINY, CPU)

    assert case.error_of(wrong(case, row, 1.05)) > case.tolerance


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_anywhere_is_infinitely_wrong(value: float) -> None:
    case = prefill_case(BATCHES[3], TINY, CPU)

    assert case.error_of(wrong(case, 61, value)) == float("inf")


def test_attending_to_one_token_too_many_is_noticed() -> None:
    case = prefill_case(Batch.extend([96], [32]), TINY, CPU)
    case.topk_length = case.topk_length + 1
    case.paged_indices[0, 97] = case.slots[97]

    assert case.error_of(PREFILL.arm("mla/torch_kv").build(case)()) > case.tolerance


def test_the_selection_is_everything_in_the_dense_regime_and_distinct_tokens_beyond() -> None:
    dense = prefill_case(Batch.extend([60], [4]), TINY, CPU)
    assert dense.ragged_indices[0, :61].tolist() == list(range(61))
    assert (dense.ragged_indices[0, 61:] == -1).all()

    sparse = prefill_case(Batch.extend([100, 4000], [1, 1]), TINY, CPU)
    chosen = sparse.ragged_indices[1]
    assert chosen.min() >= 101
    assert chosen.max() < 101 + 4001
    assert chosen.unique().numel() > 120
    assert chosen.max() - chosen.min() > 3500, "spread over the whole context"


def test_selections_overlap_as_the_setting_says() -> None:
    case = prefill_case(Batch.extend([900, 4000], [1, 40]), replace(TINY, overlap=0.8), CPU)
    rows = [set(row) for row in case.ragged_indices[1:].tolist()]
    shared = [len(row & before) / len(row) for before, row in pairwise(rows)]

    assert sum(shared) / len(shared) == pytest.approx(0.8, abs=0.03)
    assert all(min(row) >= 901 for row in rows)
    assert case.error_of(PREFILL.arm("mla/torch_kv").build(case)()) < case.tolerance


def test_a_batch_of_sums_only_cannot_be_measured() -> None:
    sums = Batch.from_totals(mode="extend", q_tokens=4, kv_tokens=8, max_kv=8)
    with pytest.raises(BatchError, match="cannot be measured"):
        prefill_case(sums, TINY, CPU)


@pytest.mark.parametrize("setting", [H100, TINY], ids=["H100", "tiny"])
def test_the_grid_has_both_regimes_ragged_counts_and_no_batch_twice(setting: Setting) -> None:
    grid = PREFILL.grid(setting)
    topk = setting.profile.index_topk

    assert len({str(batch) for batch in grid}) == len(grid)
    assert {batch.max_kv <= topk for batch in grid} == {True, False}
    assert {batch.prefix_tokens > 0 for batch in grid} == {True, False}
    assert {batch.batch_size for batch in grid} >= {1, 4, 16}
    assert sum(len(set(batch.lens or ())) > 1 for batch in grid) >= 4
    assert grid == PREFILL.grid(setting)


def test_random_batches_of_the_grid_are_as_large_as_the_others_at_most() -> None:
    grid = PREFILL.grid(H100)
    ragged = [batch for batch in grid if len(set(batch.lens or ())) > 1]
    regular = [batch for batch in grid if len(set(batch.lens or ())) == 1]

    assert len(ragged) >= 15
    assert max(one.q_tokens for one in ragged) <= max(one.q_tokens for one in regular)
    assert max(one.kv_tokens for one in ragged) <= max(one.kv_tokens for one in regular)


def test_the_first_half_of_the_grid_spans_the_whole_of_it() -> None:
    grid = PREFILL.grid(H100)
    half = grid[: len(grid) // 2]

    for feature in ("q_tokens", "kv_tokens", "batch_size"):
        whole = {getattr(batch, feature) for batch in grid}
        part = {getattr(batch, feature) for batch in half}
        assert min(part) == min(whole)
        assert max(part) >= max(whole) // 2


def test_samples_are_seeded_and_half_of_them_ragged() -> None:
    first = [PREFILL.sample(H100, Random(3)) for _ in range(1)]
    random = Random(3)
    drawn = [PREFILL.sample(H100, random) for _ in range(200)]

    assert first[0] == drawn[0]
    ragged = sum(len(set(batch.lens or ())) > 1 for batch in drawn)
    assert 50 < ragged < 150
    dense = sum(batch.max_kv <= 2048 for batch in drawn)
    assert 60 < dense < 140


def features_of(batch: Batch, heads: int = 128, model: str = "deepseek-v3.2") -> dict[str, float]:
    return PREFILL.features(replace(H100, heads=heads, profile=profile_of(model))).by_name(batch)


def test_features_round_to_tiles_of_queries_and_waves_of_the_device() -> None:
    features = features_of(Batch.extend([100] * 2, [1] * 2))

    assert features["prefix_keys"] == 202
    assert features["attended_pairs"] == 202
    assert features["makespan_keys"] == 128
    assert features["longest_union"] == features["union_makespan_keys"] == 201
    assert features["query_tiles"] == 2
    assert features["tile_pairs"] == 2 * 128 * 101


def test_a_union_of_four_reads_what_its_rows_keep_once() -> None:
    kept = [union_keys([(30720, 8192, 1)], 2048, share) for share in (0.0, 0.5, 1.0)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == pytest.approx((2048 * 2048, 2048)), "all four rows read the same keys"

    # Fours run on from one sequence into the next; rows behind the last four are none.
    assert union_keys([(100, 3, 1), (50, 2, 1), (60, 2, 1)], 2048, 0.0) == (152.5, 152.5)
    features = features_of(Batch.extend([100, 50, 60], [3, 2, 2]))
    assert (features["longest_union"], features["lone_keys"]) == (152.5, 103)
    for rows, waves in ((8, 1), (4 * 132, 1), (4 * 133, 2), (9, 1)):
        features = features_of(Batch.extend([3000], [rows]))
        assert (features["lone_rows"], features["union_waves"]) == (rows % 4 > 0, waves)


def test_a_tile_sees_the_tiles_before_it_and_the_last_one_the_end_of_its_sequence() -> None:
    features = features_of(Batch.extend([100], [300]))

    assert features["query_tiles"] == 3
    assert features["tile_pairs"] == 128 * (100 + 128 + 100 + 256 + 100 + 300)


@pytest.mark.parametrize(
    ("new", "tile"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (500, 128)]
)
def test_narrow_tiles_follow_the_mean_of_new_tokens(new: int, tile: int) -> None:
    equal = features_of(Batch.extend([10] * 4, [new] * 4))
    wide = features_of(Batch.extend([10] * 4, [new] * 4), model="glm-5")
    ragged = features_of(Batch.extend([10] * 4, [1, 1, 1, 4 * new - 3]))
    tiles = {width: 4 * -(-new // width) for width in (tile, min(tile, 64))}

    assert [equal["fa2_tiles"], wide["fa2_tiles"]] == [tiles[tile], tiles[min(tile, 64)]]
    assert ragged["fa2_tiles"] == 3 + -(-(4 * new - 3) // tile)


@pytest.mark.parametrize(
    ("batch", "wide", "narrow"),
    [
        # One tile: its block, of each head, takes all keys by itself; split keys fill the device,
        # by pieces of 128 keys at least.
        (Batch.extend([1920], [64]), 128 * 1984, 64 * 128),
        # Of 16 pieces the long sequence gets all but those of the other tile.
        (Batch.extend([1960, 180], [64, 20]), 128 * 2024, 64 * 145),
        # One key block: nothing to split.
        (Batch.extend([64], [64]), 128 * 128, 64 * 128),
        # More tiles than SMs: a long one may begin late.
        (
            Batch.extend([64] * 64, [64] * 64),
            128 * 128 * (64 * 16 / 132 + 0.5 * (64 * 16 % 132 > 0)),
            64 * 128 * 64 * 16 / 264 + 64 * 128 / 2,
        ),
    ],
)
def test_the_busiest_sm_has_its_share_or_one_tile_s_keys_that_nobody_splits(
    batch: Batch, wide: float, narrow: float
) -> None:
    """Seen on an H100 with 16 heads: 64 new tokens behind 1920 take fa3 60.8 us and fa2 45.5. An SM
    has two narrow tiles at a time."""
    features = features_of(batch, heads=16)

    assert features["tile_makespan_pairs"] == pytest.approx(wide, rel=0.04)
    assert features_of(batch, heads=16, model="glm-5")["tile_makespan_pairs"] >= wide * 0.96
    assert features["fa2_makespan_pairs"] == pytest.approx(narrow)


def narrow_pairs(prefixes: list[int]) -> tuple[float, int, float]:
    """Of 16 heads and a tile of 64 tokens a sequence, one of them too long for split keys: the
    busiest's pairs, the longest tile's, and an even share."""
    batch = Batch.extend([2000, *prefixes], [64] * (1 + len(prefixes)))
    busiest = features_of(batch, heads=16)["fa2_makespan_pairs"]
    return busiest, 64 * batch.max_kv, 64 * batch.kv_tokens * 16 / (2 * 132)


@given(st.lists(st.integers(0, 9000), max_size=15))
@example([2000] * 15)
def test_narrow_tiles_that_all_fit_at_once_take_as_long_as_the_longest(prefixes: list[int]) -> None:
    busiest, longest, _ = narrow_pairs(prefixes)

    assert busiest == longest


@given(st.lists(st.integers(0, 9000), min_size=16, max_size=60))
def test_of_more_narrow_tiles_a_long_one_may_begin_late(prefixes: list[int]) -> None:
    """Between an even share and one that ends with a whole tile more."""
    busiest, longest, share = narrow_pairs(prefixes)

    assert max(share, longest) * (1 - 1e-9) <= busiest <= (share + longest) * (1 + 1e-9)


@pytest.mark.parametrize("tokens", [1, 100, 127, 128, 129, 5000])
def test_up_to_a_tile_the_projection_of_kv_tokens_costs_a_whole_one(tokens: int) -> None:
    assert features_of(Batch.extend([0], [tokens]))["gemm_keys"] == max(tokens, 128)


def test_a_device_without_sms_has_features_too() -> None:
    """A processor."""
    assert all(one >= 0 for one in PREFILL.features(TINY).by_name(Batch.extend([5], [7])).values())


def test_an_arm_depends_on_the_work_of_its_own_kernels() -> None:
    layouts = [replace(H100, layout=layout) for layout in (KVLayout.BF16, KVLayout.FP8_PACKED)]
    every = {name for setting in layouts for name in PREFILL.features(setting).names}
    own = {arm.name: set(arm.features or every) for arm in PREFILL.arms}

    assert "fa2_tiles" in own["mha/fa2"] - own["mha/fa3"]
    assert "tile_waves" in own["mha/fa3"] - own["mha/fa2"]
    assert own["mla/flashmla_sparse"].isdisjoint({"tile_waves", "fa2_tiles", "fa2_splits"})
    assert all(some <= every for some in own.values())


@pytest.mark.parametrize(
    ("heads", "prefix", "new", "merges"),
    [(64, 0, 256, 1), (64, 0, 512, 0), (64, 0, 128, 0), (128, 128, 128, 1), (128, 128, 256, 0)],
)
def test_partial_outputs_are_merged_while_the_tiles_of_all_heads_leave_half_the_blocks_empty(
    heads: int, prefix: int, new: int, merges: int
) -> None:
    """The batches on which FlashAttention-2 took longer on an H100 than one of twice the size."""
    features = features_of(Batch.extend([prefix], [new]), heads)

    assert features["fa2_splits"] == merges


@pytest.mark.parametrize(
    ("sequences", "waves", "fa2_waves"), [(8, 1, 1), (9, 2, 1), (16, 2, 1), (17, 3, 2)]
)
def test_tiles_of_all_heads_run_in_whole_waves_of_the_device(
    sequences: int, waves: int, fa2_waves: int
) -> None:
    """132 SMs, each with one tile of FlashAttention-3 or two of FlashAttention-2, and 16 heads."""
    features = features_of(Batch.extend([3] * sequences, [2] * sequences), heads=16)
    assert features["tile_waves"] == waves
    assert features["fa2_tile_waves"] == fa2_waves
    many = features_of(Batch.extend([3] * sequences, [2] * sequences), heads=16, model="glm-5")
    assert many["fa2_tile_waves"] == waves


def test_without_a_prefix_nothing_is_read_back() -> None:
    assert features_of(Batch.extend([0], [100]))["prefix_keys"] == 0


def test_a_query_attends_to_index_topk_tokens_at_most() -> None:
    mixed = Batch.extend([0, 5000], [4096, 10])
    exact = 2048 * 2049 // 2 + 2048 * 2048 + 10 * 2048

    assert features_of(mixed)["attended_pairs"] == exact


def test_sums_of_equal_sequences_cost_what_their_lengths_cost() -> None:
    lengths = Batch.extend([300] * 5, [200] * 5)
    sums = Batch.from_totals(mode="extend", q_tokens=1000, kv_tokens=2500, max_kv=500, batch_size=5)

    assert FEATURES.features(sums) == pytest.approx(FEATURES.features(lengths))
    assert FEATURES.coordinates(sums) == pytest.approx(FEATURES.coordinates(lengths))


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
@pytest.mark.parametrize("batch", [BATCHES[0], *BATCHES[2:4]], ids=str)
def test_the_triton_arm_computes_the_reference(layout: KVLayout, batch: Batch) -> None:
    case = prefill_case(batch, replace(TINY, layout=layout), CPU)

    assert case.error_of(PREFILL.arm("mla/triton").build(case)()) < case.tolerance


class _Ragged:
    """FlashInfer's wrapper in torch: attention and log2 of the sums of its exponents."""

    def plan(
        self, starts_q: torch.Tensor, starts_kv: torch.Tensor, *_: int, causal: bool,
        sm_scale: float, **__: Any,
    ) -> None:  # fmt: skip
        self.spans = list(
            zip(
                starts_q.tolist(), starts_q.tolist()[1:], starts_kv.tolist(),
                starts_kv.tolist()[1:], strict=False,
            )
        )  # fmt: skip
        self.causal, self.scale = causal, sm_scale

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        assert len(keys) == len(values) == self.spans[-1][3]
        outs, sums = [], []
        for q_at, q_end, kv_at, kv_end in self.spans:
            new, seen = q_end - q_at, kv_end - kv_at
            scores = torch.einsum("qhd,khd->qhk", q[q_at:q_end].float(), keys[kv_at:kv_end].float())
            scores *= self.scale
            if self.causal:
                mask = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
                scores.masked_fill_(~mask[:, None], -torch.inf)
            sums.append(scores.logsumexp(-1) * 1.4426950408889634)
            weights = scores.softmax(-1).nan_to_num()
            outs.append(torch.einsum("qhk,khd->qhd", weights, values[kv_at:kv_end].float()))
        return torch.cat(outs).to(torch.bfloat16), torch.cat(sums)


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
@pytest.mark.parametrize(
    "batch", [b for b in BATCHES if b.prefix_tokens and b.max_kv <= 128], ids=str
)
def test_two_calls_and_a_merge_compute_the_reference(
    layout: KVLayout, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, cached = _Ragged(), _Ragged()
    made = iter((new, cached))
    monkeypatch.setattr(flashinfer, "ragged_wrapper", lambda *_: next(made))
    case = prefill_case(batch, replace(TINY, layout=layout), CPU)

    assert case.error_of(PREFILL.arm("mha/fa3_merged").build(case)()) < case.tolerance
    assert (new.causal, cached.causal) == (True, False)


def test_without_a_prefix_nothing_is_merged() -> None:
    arm = PREFILL.arm("mha/fa3_merged")

    assert "nothing is merged" in str(arm.allowed(Batch.extend([0, 0], [64, 7]), H100))
    assert arm.allowed(Batch.extend([0, 100], [64, 7]), H100) is None


def test_trtllm_gets_lengths_offsets_and_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    batch = Batch.extend([100, 0], [3, 20])
    case = prefill_case(batch, TINY, CPU)

    def ragged(**arguments: Any) -> torch.Tensor:
        given.update(arguments)
        return PREFILL.arm("mha/torch").build(case)()

    class Module:
        trtllm_ragged_attention_deepseek = staticmethod(ragged)

    monkeypatch.setattr(flashinfer, "_module", lambda name: Module)
    out = PREFILL.arm("mha/trtllm_ragged").build(case)()

    assert case.error_of(out) < case.tolerance
    assert given["seq_lens"].tolist() == [103, 20]
    assert given["cum_seq_lens_q"].tolist() == [0, 3, 23]
    assert given["cum_seq_lens_kv"].tolist() == [0, 103, 123]
    assert (given["max_q_len"], given["max_kv_len"], given["batch_size"]) == (20, 103, 2)
    assert given["bmm1_scale"] == pytest.approx(64**-0.5)
    assert (given["key"].shape, given["value"].shape) == ((123, 4, 64), (123, 4, 32))


def test_a_workspace_is_made_once_a_device_however_many_threads_ask() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: flashinfer.workspace(CPU), range(32)))

    assert len({one.data_ptr() for one in made}) == 1
    assert not made[0][:64].any()


def test_without_an_optional_library_its_arms_are_left_out() -> None:
    bf16 = replace(H100, layout=KVLayout.BF16, missing=frozenset({"sglang_triton"}))

    assert "mla/triton_sparse_mla" not in [arm.name for arm in PREFILL.candidates(bf16)]
    assert PREFILL.arm("mla/fa3") in PREFILL.candidates(bf16)


def test_what_plug_ins_do_not_take_are_arms() -> None:
    names = {arm.name for arm in PREFILL.arms}

    assert names > NOT_SGLANGS | SGLANGS_TRITON


def test_a_lossy_arm_runs_only_where_the_user_asked_for_it() -> None:
    names = {arm.choice: arm for arm in PREFILL.arms if arm.loss}
    assert set(names) == {"flashmla_sparse_q8", "torch_sparse_q8"} == set(LOSSY)
    asked = replace(H100, lossy=frozenset({"flashmla_sparse_q8"}))

    assert set(PREFILL.candidates(asked)) - set(PREFILL.candidates(H100)) == {
        names["flashmla_sparse_q8"]
    }
    with pytest.raises(UnknownName, match="unknown lossy arm 'flashmla_kv'"):
        lossy_named(["flashmla_sparse_q8", "flashmla_kv"])


Q8 = replace(TINY, lossy=frozenset({"torch_sparse_q8"}))


@pytest.mark.parametrize("batch", BATCHES[1:], ids=str)
def test_rounding_to_fp8_costs_a_few_percent_and_more_than_another_arm_may(batch: Batch) -> None:
    case = prefill_case(batch, Q8, CPU)
    arm = PREFILL.arm("mla/torch_sparse_q8")
    assert arm in PREFILL.candidates(Q8)
    assert arm.tolerance is not None

    error = case.error_of(arm.build(case)())

    assert error < arm.tolerance / 2
    assert error > 2 * case.error_of(PREFILL.arm("mla/torch_sparse").build(case)())


def test_only_a_lossy_arm_is_measured_by_a_tolerance_of_its_own() -> None:
    batch = max(BATCHES, key=lambda one: one.q_tokens)
    arm = PREFILL.arm("mla/torch_sparse_q8")
    device = torch.device("cpu")

    for one, status in ((arm, Status.OK), (replace(arm, tolerance=None), Status.WRONG)):
        (row,) = measure_batch(PREFILL, batch, [one], Q8, device, timer_for(device))
        assert row.status is status
        assert row.error is not None
        assert 0.02 < row.error < 0.06


def cast_q(out: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """`concat_and_cast_q_fp8_pad`'s contract: the first heads are written, no others."""
    assert nope.stride(-1) == rope.stride(-1) == 1
    out[:, : nope.shape[1]] = torch.cat((nope, rope), -1).to(out.dtype)


def q8_prefill(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, unit: torch.Tensor
) -> torch.Tensor:
    """`sparse_mla_q8kv8_prefill_fwd`'s contract: rows of zeros for indices of -1, unit scales."""
    assert q.dtype == latents.dtype == torch.float8_e4m3fn
    assert q.shape[1] % 64 == 0
    assert q.is_contiguous()
    assert latents.is_contiguous()
    assert unit.tolist() == [1.0]
    spare = indices.shape[1]
    assert not latents[-spare:].view(torch.uint8).any()
    assert int(indices.max()) < len(latents) - spare
    return sparse_mla_reference(q.bfloat16(), latents.bfloat16(), indices, scale, 128)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_the_fp8_kernel_gets_q_and_gathered_latents_in_e4m3(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "cast_q", cast_q)
    monkeypatch.setattr(sglang, "q8_prefill", q8_prefill)
    case = prefill_case(batch, TINY, CPU)
    arm = PREFILL.arm("mla/flashmla_sparse_q8")
    run = arm.build(case)
    first, again = run(), run()

    assert first.shape == (batch.q_tokens, 4, 32)
    assert torch.equal(first, again)
    assert arm.tolerance is not None
    assert case.error_of(first) < arm.tolerance / 2


def test_a_kernel_is_not_planned_for_a_profile_that_it_cannot_take() -> None:
    tiny = replace(H100, profile=profile_of("tiny"), heads=4)
    batch = Batch.extend([50], [10])

    allowed = [a for a in PREFILL.candidates(tiny) if a.allowed(batch, tiny) is None]
    assert PREFILL.arm("mha/sdpa") in allowed
    assert all(arm.requires is None for arm in allowed)


def test_a_cpu_is_told_which_arms_are_for_gpus() -> None:
    batch = Batch.extend([50], [10])

    assert PREFILL.arm("mha/sdpa").allowed(batch, TINY) == "mha/sdpa is declared for GPUs only"
    assert PREFILL.arm("mha/fa2").allowed(batch, TINY) == "mha/fa2 has no kernels for cpu"


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_kernel_reads_the_bf16_pool_by_the_selection(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_kernel, "fa3_sparse", fa3_sparse)
    case = prefill_case(batch, replace(TINY, layout=KVLayout.BF16), CPU)
    output = PREFILL.arm("mla/fa3").build(case)()

    assert output.shape == (batch.q_tokens, 4, 32)
    assert case.error_of(output) < case.tolerance


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
@pytest.mark.parametrize("union", ["", "_union4"])
def test_sglangs_triton_kernel_reads_bf16_whatever_the_pool(
    layout: KVLayout, union: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unions = []

    def kernel(
        q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, rank: int,
        lengths: torch.Tensor, union: int,
    ) -> torch.Tensor:  # fmt: skip
        assert latents.dtype == torch.bfloat16 and q.is_contiguous() and indices.is_contiguous()
        assert torch.equal((indices >= 0).sum(1), lengths)
        unions.append(union)
        return sparse_mla_reference(q, latents, indices, scale, rank)

    monkeypatch.setattr(sglang, "triton_sparse", kernel)
    for batch in BATCHES:
        case = prefill_case(batch, replace(TINY, layout=layout), CPU)
        output = PREFILL.arm(f"mla/triton_sparse_mla{union}").build(case)()
        assert case.error_of(output) < case.tolerance
    assert set(unions) == {int(union[-1:] or 0)}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_mixed_batch_is_one_row_of_all_queries(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, schedule: object
    ) -> torch.Tensor:
        assert schedule is not None
        assert q.shape[:2] == indices.shape[:2] == (1, batch.q_tokens)
        flat = pool.view(torch.uint8).flatten(0, 2)
        latents = packed_fp8.dequantize_reference(flat, torch.arange(len(flat)), 128, 32)
        return sparse_mla_reference(q[0], latents, indices[0], scale, 128)[None]

    monkeypatch.setattr(flash_mla, "sparse_decode", kernel)
    monkeypatch.setattr(flash_mla, "new_schedule", object)
    case, arm = prefill_case(batch, TINY, CPU), PREFILL.arm("mla/flashmla_kv_mixed")
    assert arm.first is not None
    for build in (arm.build, arm.first):
        assert case.error_of(build(case)()) < case.tolerance


def test_only_the_arms_with_a_schedule_have_a_cost_of_a_pass() -> None:
    assert [arm.name for arm in PREFILL.arms if arm.first is not None] == [
        "mla/flashmla_kv", "mla/flashmla_kv_mixed",
    ]  # fmt: skip
