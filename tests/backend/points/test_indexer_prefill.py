"""The indexer_prefill point: every way scores the same keys, and memory decides who may."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels import gather_keys
from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.indexer_prefill.arms import chunks
from nsa_tune.backend.points.indexer_prefill.case import LogitsCase
from nsa_tune.backend.points.indexer_prefill.features import (
    chunk_bytes,
    makespan_keys,
    rows_per_chunk,
)
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

PREFILL = POINTS["indexer_prefill"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H200 = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H200"])
BATCHES = [
    Batch.extend([0], [150]),
    Batch.extend([300], [5]),
    Batch.extend([0, 500, 17], [40, 1, 120]),
]


def allowed(batch: Batch, setting: Setting) -> list[str]:
    arms = PREFILL.candidates(setting)
    return [arm.name for arm in arms if arm.allowed(batch, setting) is None]


class _DeepGemm(ModuleType):
    """DeepGEMM's two logits kernels in torch, by the contracts of 0.1.5."""

    __file__ = "/nowhere/deep_gemm/__init__.py"

    def get_num_sms(self) -> int:
        return 16

    def fp8_mqa_logits(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor,
        first: torch.Tensor, end: torch.Tensor, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert not clean_logits and q.is_contiguous()
        keys, scales = kv
        wide = (len(keys) + 511) // 256 * 256
        out = torch.full((len(q), wide), float("nan"))
        for row in range(len(q)):
            seen = slice(int(first[row]), int(end[row]))
            scores = (q[row].float() @ keys[seen].float().T).relu()
            out[row, seen] = weights[row] @ scores * scales[seen]
        return out[:, : len(keys)]

    def fp8_paged_mqa_logits(
        self, q: torch.Tensor, pool: torch.Tensor, weights: torch.Tensor, lens: torch.Tensor,
        table: torch.Tensor, schedule: torch.Tensor, longest: int, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert not clean_logits and schedule.shape == (17, 2) and lens.shape == (len(q), 1)
        assert table.is_contiguous() and table.shape[1] * pool.shape[1] >= longest
        out = torch.full((len(q), -(-longest // 256) * 256), float("nan"))
        for row in range(len(q)):
            place = torch.arange(int(lens[row, 0]))
            slots = table[row, place // pool.shape[1]] * pool.shape[1] + place % pool.shape[1]
            keys, scales = gather_keys.gather_keys_reference(pool, slots)
            scores = (q[row, 0].float() @ keys.float().T).relu()
            out[row, : len(place)] = weights[row] @ scores * scales
        return out[:, :longest]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM in torch, and the references of our own kernels."""
    from nsa_tune.backend.kernels import mqa_schedule

    monkeypatch.setattr(deep_gemm, "_module", lambda: _DeepGemm("deep_gemm"))
    split = mqa_schedule.Split.LAST_MORE
    monkeypatch.setattr(deep_gemm, "schedule_split", lambda arch: split)
    monkeypatch.setattr(gather_keys, "gather_keys", gather_keys.gather_keys_reference)
    monkeypatch.setattr(mqa_schedule, "mqa_schedule", mqa_schedule.mqa_schedule_reference)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", ["ragged", "paged", "chunked", "torch"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_every_way_computes_the_reference(batch: Batch, name: str) -> None:
    case = LogitsCase(batch, TINY, CPU)
    case.rows_a_chunk = 37
    output = PREFILL.arm(name).build(case)()

    width = batch.max_kv if name == "paged" else batch.kv_tokens
    rows = (batch.q_tokens - 1) % 37 + 1 if name == "chunked" else batch.q_tokens
    assert output.shape == (rows, width)
    assert case.error_of(output) < case.tolerance


@pytest.mark.usefixtures("fakes")
def test_chunks_are_the_rows_one_after_the_other() -> None:
    case = LogitsCase(BATCHES[2], TINY, CPU)
    whole = PREFILL.arm("ragged").build(case)()
    case.rows_a_chunk = 37

    parts = list(chunks(case))
    assert [start for start, _ in parts] == [0, 37, 74, 111, 148]
    torch.testing.assert_close(torch.cat([part for _, part in parts]), whole, equal_nan=True)
    assert all(case.error_from(part, start) < case.tolerance for start, part in parts)


def test_a_chunk_stays_within_the_budget() -> None:
    case = LogitsCase(Batch.extend([1000], [500]), TINY, CPU)

    # 1500 keys and 256 more are 7 * 256 values.
    assert case.rows_a_chunk == 2**16 // (7 * 1024)


def test_each_query_sees_the_keys_of_its_sequence_up_to_its_own() -> None:
    case = LogitsCase(Batch.extend([7, 0], [2, 3]), TINY, CPU)

    assert case.lengths.tolist() == [8, 9, 1, 2, 3]
    assert case.first.tolist() == [0, 0, 9, 9, 9]
    assert case.end.tolist() == [8, 9, 10, 11, 12]
    assert case.block_table.shape[0] == 5
    assert case.sequences == [(0, 9, 2), (9, 12, 3)]


def _outputs(case: LogitsCase) -> torch.Tensor:
    return PREFILL.arm("torch").build(case)()


def test_a_wrong_logit_is_noticed_and_one_that_nobody_sees_is_not() -> None:
    case = LogitsCase(BATCHES[2], TINY, CPU)
    output = _outputs(case)

    output[0, 1:] = float("nan")
    output[40, :40] = float("nan")
    assert case.error_of(output) < case.tolerance
    output[0, 0] = float("nan")
    assert case.error_of(output) == float("inf")
    output[0, 0] = 1e4
    assert case.error_of(output) > case.tolerance


def test_gathered_keys_are_those_of_the_pool() -> None:
    case = LogitsCase(BATCHES[2], TINY, CPU)
    keys, scales = gather_keys.gather_keys_reference(case.pool, case.slots)

    assert torch.equal(keys.float(), case._keys.keys[case.slots.long()].float())
    assert torch.equal(scales, case._keys.scales[case.slots.long()])


def test_sums_alone_cannot_be_measured() -> None:
    with pytest.raises(BatchError, match="lengths"):
        LogitsCase(BATCHES[0].sums, TINY, CPU)


def test_chunks_are_for_logits_that_pass_the_budget() -> None:
    assert allowed(Batch.extend([4096], [1024]), H200) == ["ragged", "paged"]
    assert allowed(Batch.extend([32768], [8192]), H200) == ["ragged", "paged", "chunked"]
    assert "ragged itself" in str(PREFILL.arm("chunked").allowed(Batch.extend([4096], [9]), H200))


def test_only_chunks_are_left_where_the_logits_pass_a_quarter_of_the_memory() -> None:
    one = Batch.extend([0], [110000])
    several = Batch.extend([30000] * 16, [1200] * 16)

    assert allowed(one, H200) == ["chunked"]
    assert "GiB of logits" in str(PREFILL.arm("ragged").allowed(one, H200))
    # Paged rows are as wide as the longest sequence, ragged ones as all together.
    assert allowed(several, H200) == ["paged", "chunked"]


def test_nothing_is_scored_where_everything_is_selected() -> None:
    assert allowed(Batch.extend([1048], [1000]), H200) == []
    assert allowed(Batch.extend([1049], [1000]), H200) == ["ragged", "paged"]
    assert allowed(Batch.extend([100], [28]), TINY) == []


def test_deep_gemms_shapes_count() -> None:
    odd = replace(H200, profile=replace(H200.profile, index_heads=16))

    assert allowed(Batch.extend([4096], [1024]), odd) == []


def test_features_count_pairs_keys_and_chunks() -> None:
    features = PREFILL.features(H200).by_name(Batch.extend([32768, 0], [8192, 300]))

    assert features["rows"] == 8492
    assert features["scored_pairs"] == 8192 * 32768 + 8192 * 8193 / 2 + 300 * 301 / 2
    assert features["keys"] == 41260
    # 41260 keys are 163 * 256 values with their padding; 8492 rows of these are 1.4 GB.
    assert features["chunks"] == 3


GLM = replace(H200, profile=profile_of("glm-5"), heads=64)


@pytest.mark.parametrize(("setting", "rows"), [(H200, 2), (GLM, 4)], ids=["64 heads", "32 heads"])
def test_an_sm_computes_as_many_queries_at_once_as_fill_128_heads(
    setting: Setting, rows: int
) -> None:
    """Each of 132 SMs a block of rows that all see about 4096 keys; then one of them another."""
    features = PREFILL.features(setting)
    full, more = (
        features.by_name(Batch.extend([4096], [132 * rows + extra]))["makespan_keys"]
        for extra in (0, 1)
    )

    assert full == pytest.approx(4096, rel=0.15)
    assert more == pytest.approx(2 * 4096, rel=0.1)


@pytest.mark.parametrize("batch", [*BATCHES, Batch.extend([1000], [500])], ids=str)
def test_a_chunk_has_the_rows_that_its_features_say(batch: Batch) -> None:
    case = LogitsCase(batch, TINY, CPU)
    rows = rows_per_chunk(batch, chunk_bytes(TINY))

    assert min(rows, batch.q_tokens) == min(case.rows_a_chunk, batch.q_tokens)
    assert PREFILL.features(TINY).by_name(batch)["chunks"] == -(-batch.q_tokens // rows)


@pytest.mark.parametrize("batch", [Batch.extend([4096], [77]), Batch.extend([5000] * 3, [40] * 3)],
                         ids=str)  # fmt: skip
def test_sums_of_equal_sequences_cost_what_their_lengths_cost(batch: Batch) -> None:
    assert PREFILL.features(H200).by_name(batch.sums) == PREFILL.features(H200).by_name(batch)


@pytest.mark.parametrize("setting", [H200, TINY], ids=["H200", "tiny"])
def test_the_grid_spans_new_tokens_prefix_and_sequences(setting: Setting) -> None:
    grid, topk = PREFILL.grid(setting), setting.profile.index_topk

    assert 40 <= len(grid) <= 150
    assert len({str(batch) for batch in grid}) == len(grid)
    assert all(batch.max_kv > topk for batch in grid)
    assert {batch.batch_size for batch in grid} == {1, 4, 16}
    if setting is H200:
        assert sum("chunked" in allowed(batch, setting) for batch in grid) > 10


def test_samples_are_seeded_and_some_are_ragged() -> None:
    random = Random(5)
    drawn = [PREFILL.sample(H200, random) for _ in range(100)]

    assert drawn[0] == PREFILL.sample(H200, Random(5))
    assert 20 < sum(len(set(batch.lens or ())) > 1 for batch in drawn) < 80
    assert all(batch.max_kv > 2048 for batch in drawn)


def test_deep_gemm_has_no_module_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "answering", lambda name: None)
    monkeypatch.setattr(gather_keys, "gather_keys", gather_keys.gather_keys_reference)
    deep_gemm._module.cache_clear()
    run = PREFILL.arm("ragged").build(LogitsCase(BATCHES[0], TINY, CPU))

    with pytest.raises(Exception, match="deep_gemm is not installed"):
        run()


@pytest.mark.parametrize(
    ("sequences", "keys"),
    [
        # 130 blocks for 132 SMs; the one with row 64 and row 65 sees two sequences.
        ([(9365, 65)] * 4, 9430 + 9366),
        ([(9365, 64)] * 4, 9429),
        # Three single rows in two blocks.
        ([(100, 1), (200, 1), (300, 1)], 101 + 201),
        ([(100, 2), (200, 1)], 201),
    ],
)
def test_a_block_of_two_rows_scores_the_keys_of_both_their_sequences(
    sequences: list[tuple[int, int]], keys: int
) -> None:
    batch = Batch.extend([prefix for prefix, _ in sequences], [new for _, new in sequences])

    assert makespan_keys(batch, 2, 132) == keys


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 300)), min_size=1, max_size=6),
    st.sampled_from([2, 4]),
    st.sampled_from([1, 7, 132]),
)
def test_blocks_of_rows_are_dealt_out_in_turn(
    sequences: list[tuple[int, int]], block: int, sms: int
) -> None:
    """As DeepGEMM's kernel does: row by row, then block by block."""
    batch = Batch.extend([prefix for prefix, _ in sequences], [new for _, new in sequences])
    seen, key = [], 0
    for prefix, new in sequences:
        seen += [(key, key + prefix + i) for i in range(1, new + 1)]
        key += prefix + new
    keys = [0] * sms
    for i in range(0, len(seen), block):
        keys[i // block % sms] += seen[i : i + block][-1][1] - seen[i][0]

    assert makespan_keys(batch, block, sms) == max(keys)


def test_a_block_of_four_rows_may_see_four_sequences() -> None:
    assert makespan_keys(Batch.extend([99] * 4, [1] * 4), 4, 132) == 400
