"""The indexer_topk point: exact selections only, ties apart, and nothing where all are selected."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.indexer_topk.case import TopkCase
from nsa_tune.backend.points.indexer_topk.features import terms
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

TOPK = POINTS["indexer_topk"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H200 = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H200"])
BATCHES = [
    Batch.decode([500]),
    Batch.verify([200, 3, 90], 3),
    Batch.draft_extend([300, 129], 2),
    Batch.extend([0, 400], [129, 7]),
]


def allowed(batch: Batch, setting: Setting) -> list[str]:
    arms = TOPK.candidates(setting)
    return [arm.name for arm in arms if arm.allowed(batch, setting) is None]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_the_reference_selects_what_a_sort_selects(batch: Batch) -> None:
    case = TopkCase(batch, TINY, CPU)
    output = TOPK.arm("torch").build(case)()

    assert case.error_of(output) == 0
    for row, length in enumerate(case.lengths.tolist()):
        order = case.scores[row, :length].argsort(descending=True)[:128]
        chosen = output[row][output[row] >= 0]
        assert set(chosen.tolist()) == set(order.tolist())


def test_each_query_chooses_among_the_keys_up_to_its_own() -> None:
    assert TopkCase(BATCHES[1], TINY, CPU).lengths.tolist() == [
        198, 199, 200, 1, 2, 3, 88, 89, 90,
    ]  # fmt: skip
    assert TopkCase(BATCHES[3], TINY, CPU).lengths.tolist() == [*range(1, 130), *range(401, 408)]


def test_rows_lie_as_far_apart_as_deep_gemms() -> None:
    case = TopkCase(BATCHES[0], TINY, CPU)

    assert case.scores.shape == (1, 500)
    assert case.padded.shape == (1, 512) and case.padded.is_contiguous()


def drawn(case: TopkCase, layers: int) -> list[torch.Tensor]:
    return [layer for layer, _ in zip(case.layers(), range(layers), strict=False)]


def test_layers_have_scores_of_their_own_and_rows_means_of_their_own() -> None:
    case = TopkCase(Batch.decode([2500] * 4), H200, CPU)
    layers = drawn(case, 65)
    means = torch.stack(layers[:64]).mean(dim=2)

    assert layers[0].data_ptr() == case.scores.data_ptr() == layers[64].data_ptr()
    assert -1.1 < means.min() < -0.9 and -0.1 < means.max() < 0.1
    assert len(set(means.flatten().tolist())) == 64 * 4
    assert next(case.layers(padded=True)).shape == case.padded.shape


def test_an_arm_goes_from_layer_to_layer() -> None:
    case = TopkCase(BATCHES[0], TINY, CPU)
    run = TOPK.arm("torch").build(case)
    found = [run() for _ in range(65)]

    assert case.error_of(found[0]) == 0
    assert all(case.error_of(one) > case.tolerance for one in found[1:64])
    assert torch.equal(found[0], found[64])


@pytest.mark.parametrize(("most", "layers"), [(1, 1), (1024, 2), (1535, 2), (2**20, 64)])
def test_fewer_layers_where_a_layer_has_many_scores(
    most: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_tune.backend.points.indexer_topk.case._ON_A_CPU", most)
    case = TopkCase(BATCHES[0], TINY, CPU)

    assert case.padded.shape == (1, 512)
    assert len({layer.data_ptr() for layer in drawn(case, 128)}) == layers


def test_any_order_and_any_of_equal_scores_is_right() -> None:
    case = TopkCase(Batch.verify([300, 40], 2), TINY, CPU)
    case.padded[0] = 1.0
    case.padded[1] = 0.0
    case.padded[1, :200] = 2.0
    output = sampled_topk_reference(case.scores, case.lengths, 128)
    output[1] = torch.randperm(200)[:128].int()
    output[0] = torch.arange(298, 170, -1).int()

    assert case.error_of(output.flip(1)) == 0


@pytest.mark.parametrize("what", ["twice", "worse", "missing", "beyond", "short", "kind", "sign"])
def test_one_wrong_place_is_wrong(what: str) -> None:
    case = TopkCase(Batch.verify([300, 40], 2), TINY, CPU)
    output = sampled_topk_reference(case.scores, case.lengths, 128)
    if what == "twice":
        output[1, 5] = output[1, 6]
    elif what == "worse":
        output[1, 5] = int(case.scores[1, :300].argmin())
    elif what == "missing":
        output[0, 3] = -1
    elif what == "beyond":
        output[2, 0] = 39
    elif what == "short":
        output = output[:, :-1]
    elif what == "kind":
        output = output.float()
    else:
        output[3, -1] = -2

    assert case.error_of(output) == float("inf") > case.tolerance


def fast_topk_v2(scores: torch.Tensor, topk: int, kept: int) -> torch.Tensor:
    """What sglang-kernel selects of one row: of the scores that share the top 8 bits of their fp16
    value with the last one selected, it looks at the first `kept` that it comes across."""
    bits = scores.half().view(torch.int16).int() & 0xFFFF
    top = torch.where(bits >= 0x8000, ~bits & 0xFFFF, bits | 0x8000) >> 8
    last = top.sort(descending=True).values[topk - 1]
    surely = (top > last).nonzero().flatten()
    candidates = (top == last).nonzero().flatten()[:kept]
    best = candidates[scores[candidates].argsort(descending=True)]
    return torch.cat((surely, best))[:topk].int()


@pytest.mark.parametrize(
    ("keys", "spread", "right"),
    [(4096, 0.0, True), (4096, 0.01, True), (131072, 1.0, True), (240000, 1.0, True),
     (300000, 1.0, False), (65536, 0.02, False)],
)  # fmt: skip
def test_a_kernel_that_keeps_4096_candidates_is_judged_by_the_scores_at_hand(
    keys: int, spread: float, right: bool
) -> None:
    case = TopkCase(Batch.decode([keys]), replace(H200, device=TINY.device), CPU)
    case.padded.sub_(case.padded.mean())
    if spread < 1:
        case.padded.mul_(spread).add_(1.1)
    output = fast_topk_v2(case.scores[0], 2048, 4096)[None]

    assert (case.error_of(output) == 0) is right


def test_sums_alone_cannot_be_measured() -> None:
    with pytest.raises(BatchError, match="lengths"):
        TopkCase(BATCHES[0].sums, TINY, CPU)


def test_nothing_is_selected_where_everything_is() -> None:
    assert allowed(Batch.extend([1920], [128]), H200) == []
    assert allowed(Batch.extend([1920], [129]), H200) == [
        "sglang",
        "sampled",
        "flashinfer",
        "sglang_v2",
    ]
    assert allowed(Batch.decode([128]), TINY) == []
    assert allowed(Batch.decode([129]), TINY) == ["torch"]
    captured = Batch.decode([100] * 4, captured=True)
    assert allowed(captured, H200) == ["sglang", "sampled", "flashinfer", "sglang_v2"]


def test_the_libraries_select_2048() -> None:
    batch = Batch.decode([9000])
    few = replace(H200, profile=replace(H200.profile, index_topk=1024))
    many = replace(H200, profile=replace(H200.profile, index_topk=4096))

    assert allowed(batch, few) == ["sampled", "flashinfer"]
    assert allowed(batch, many) == []
    assert "2048" in str(TOPK.arm("sglang").allowed(batch, few))


def test_scores_that_fill_the_memory_and_rows_that_pass_the_offsets_are_refused() -> None:
    wide = Batch.from_totals(mode="extend", q_tokens=65536, kv_tokens=163840, max_kv=163840)
    long = Batch.from_totals(mode="decode", q_tokens=2**21, kv_tokens=2**30, max_kv=2304,
                             batch_size=2**21)  # fmt: skip
    vast = replace(H200, device=replace(H200.device, memory=2**50))

    assert "GiB of logits" in str(TOPK.arm("sampled").allowed(wide, H200))
    assert allowed(wide, H200) == []
    assert allowed(long, vast) == ["sglang", "sampled", "sglang_v2"]
    assert "32-bit" in str(TOPK.arm("flashinfer").allowed(long, vast))


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA B200"])
def test_every_kernel_is_a_candidate_on_a_gpu(gpu: str) -> None:
    setting = replace(H200, device=KNOWN[gpu])

    names = [arm.name for arm in TOPK.candidates(setting)]
    assert names == ["sglang", "sampled", "flashinfer", "sglang_v2"]


def test_rows_that_take_all_they_see_read_no_scores() -> None:
    features = TOPK.features(H200).by_name(Batch.extend([0, 8192], [3, 2]))

    assert features == {
        "scores": 8193 + 8194, "waves": 1, "makespan_scores": 8194, "short_rows": 1,
    }  # fmt: skip


def test_a_row_that_is_read_once_has_a_regime_of_its_own() -> None:
    regime = TOPK.features(H200).regime

    assert regime(Batch.decode([5000, 8192])) == 0
    assert regime(Batch.decode([5000, 8193])) == 1
    assert TOPK.regime_group(0) == TOPK.regime_group(1)


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6
)  # fmt: skip


@given(sequences=SEQUENCES, topk=st.integers(1, 30), slots=st.integers(1, 20))
def test_work_is_of_the_rows_that_select(
    sequences: list[tuple[int, int]], topk: int, slots: int
) -> None:
    batch = Batch.extend([prefix for prefix, _ in sequences], [new for _, new in sequences])
    rows = [
        kv
        for prefix, new in sequences
        for kv in range(prefix + 1, prefix + new + 1)
        if kv > topk
    ]  # fmt: skip
    work = terms(batch, topk, slots)

    assert work.short_rows == (len(rows) < batch.q_tokens)
    assert work.scores == sum(rows)
    assert work.waves == -(-len(rows) // slots)
    assert min(sum(rows) / slots, max(rows, default=0)) <= work.makespan_scores
    assert work.makespan_scores <= sum(rows) / slots + max(rows, default=0)


@pytest.mark.parametrize("batch", [Batch.decode([4096] * 6), Batch.extend([5000] * 3, [40] * 3)],
                         ids=str)  # fmt: skip
def test_sums_of_equal_sequences_cost_what_their_lengths_cost(batch: Batch) -> None:
    assert TOPK.features(H200).by_name(batch.sums) == TOPK.features(H200).by_name(batch)


@pytest.mark.parametrize("setting", [H200, TINY], ids=["H200", "tiny"])
def test_the_grid_has_steps_and_extends_that_select(setting: Setting) -> None:
    grid, topk = TOPK.grid(setting), setting.profile.index_topk

    assert 60 <= len(grid) <= 150
    assert len({str(batch) for batch in grid}) == len(grid)
    assert {str(batch.mode) for batch in grid} == {"extend", "decode", "target_verify"}
    assert all(batch.max_kv > topk for batch in grid)
    assert sum(len(set(batch.lens or ())) > 1 for batch in grid) > 10
    # Some sequences take all keys, beside one that selects.
    assert any(batch.kv_tokens < batch.batch_size * topk for batch in grid)
    assert max(batch.max_kv for batch in grid) == 64 * topk


def test_samples_are_seeded_and_some_are_ragged() -> None:
    random = Random(5)
    batches = [TOPK.sample(H200, random) for _ in range(100)]

    assert batches[0] == TOPK.sample(H200, Random(5))
    assert 20 < sum(len(set(batch.lens or ())) > 1 for batch in batches) < 80
    assert all(batch.max_kv > 2048 for batch in batches)
