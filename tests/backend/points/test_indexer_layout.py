"""The indexer_layout point: its arms agree, and next_n decides which of them there are."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.indexer_layout.case import IndexerCase
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status

INDEXER = POINTS["indexer_layout"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H100 = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H100 80GB HBM3"]
)
REGIME = INDEXER.features(H100).regime
BATCHES = [
    Batch.decode([5]),
    # Of one key every head's score may be 0.
    Batch.decode([1] * 8),
    Batch.verify([64, 3, 200], 2),
    Batch.verify([17, 90], 3),
    Batch.verify([64] * 3, 4),
]


def runs() -> Iterator[tuple[Batch, str]]:
    for batch in BATCHES:
        for arm in INDEXER.candidates(TINY):
            if arm.allowed(batch, TINY) is None:
                yield batch, arm.name


def allowed(batch: Batch, setting: Setting) -> list[str]:
    arms = [arm for arm in INDEXER.candidates(setting) if arm.allowed(batch, setting) is None]
    return [arm.name.partition("/")[0] for arm in arms]


@pytest.mark.parametrize(("batch", "name"), list(runs()), ids=str)
def test_every_layout_computes_the_reference(batch: Batch, name: str) -> None:
    case = IndexerCase(batch, TINY, CPU)
    output = INDEXER.arm(name).build(case)()

    assert output.shape == (batch.q_tokens, batch.max_kv)
    assert case.error_of(output) < case.tolerance


def test_a_wrong_logit_is_noticed_and_one_beyond_the_context_is_not() -> None:
    case = IndexerCase(BATCHES[2], TINY, CPU)
    output = INDEXER.arm("native/torch").build(case)()

    output[3, 3:] = float("nan")
    assert case.error_of(output) < case.tolerance
    output[3, 0] = float("nan")
    assert case.error_of(output) == float("inf")
    output[3, 0] = 1e3
    assert case.error_of(output) > case.tolerance


def test_hopper_takes_next_n_of_1_and_2_natively_and_4_in_pairs() -> None:
    assert allowed(Batch.decode([4096]), H100) == ["native"]
    assert allowed(Batch.verify([4096], 2), H100) == ["native", "flatten"]
    assert allowed(Batch.verify([4096], 3), H100) == ["flatten"]
    assert allowed(Batch.verify([4096], 4), H100) == ["pairs", "flatten"]


def test_other_architectures_take_any_next_n_natively() -> None:
    b200 = Setting(H100.profile, 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA B200"])

    assert allowed(Batch.verify([4096], 3), b200) == ["native", "flatten"]
    assert allowed(Batch.verify([4096], 4), b200) == ["native", "pairs", "flatten"]


def test_logits_that_fill_the_memory_are_refused() -> None:
    huge = Batch.verify([131072] * 16000, 4)

    reasons = [arm.allowed(huge, H100) for arm in INDEXER.candidates(H100)]
    assert all(reason is not None for reason in reasons)
    assert any("GiB of logits" in str(reason) for reason in reasons)


@pytest.mark.parametrize("setting", [H100, TINY], ids=["H100", "tiny"])
def test_the_grid_spans_batch_context_and_next_n(setting: Setting) -> None:
    grid = INDEXER.grid(setting)

    assert len({str(batch) for batch in grid}) == len(grid)
    assert {batch.next_n for batch in grid} == {2, 3, 4}
    assert len({batch.batch_size for batch in grid}) >= 6
    assert max(batch.max_kv for batch in grid) == 64 * setting.profile.index_topk


def test_samples_are_seeded_and_some_are_ragged() -> None:
    random = Random(5)
    drawn = [INDEXER.sample(H100, random) for _ in range(100)]

    assert drawn[0] == INDEXER.sample(H100, Random(5))
    assert 20 < sum(len(set(batch.lens or ())) > 1 for batch in drawn) < 80


def test_powers_of_two_are_swept_with_contexts_of_three_lengths_too() -> None:
    mixed = [batch for batch in INDEXER.grid(H100) if len(set(batch.lens or ())) > 1]

    assert {batch.batch_size for batch in mixed} == {2, 4, 8, 16, 32, 64, 128, 256}
    assert any(str(batch) == "target_verify:n2:6144x3,4096x2,2048x3" for batch in mixed)


@pytest.mark.parametrize("next_n", [2, 4])
def test_batches_with_at_most_a_segment_of_keys_an_sm_have_a_regime_of_their_own(
    next_n: int,
) -> None:
    fits = 132 * 256 // next_n

    few, more = (REGIME(Batch.verify([k], next_n)) for k in (fits, fits + 1))

    assert few != more == REGIME(Batch.verify([fits] * 4, next_n))
    assert few == REGIME(Batch.verify([fits // 4] * 4, next_n))
    assert {few, more}.isdisjoint(
        REGIME(Batch.verify([k], n)) for n in {2, 3, 4} - {next_n} for k in (fits, 8 * fits)
    )


def test_an_arm_that_failed_on_few_keys_is_not_taken_for_more() -> None:
    grid = [b for b in INDEXER.grid(H100) if b.next_n == 2 and b.kv_tokens <= 16000]
    rows = [
        Measurement(INDEXER.name, str(b), arm, Status.OK, 9.0, 9.0, 9.0, 9)
        for b in grid
        for arm in ("native/deep_gemm", "flatten/deep_gemm")
    ]
    failed = Batch.verify([4000] * 4, 2)
    rows.append(
        Measurement(INDEXER.name, str(failed), "flatten/deep_gemm", Status.FAILED, reason="hung")
    )

    policy = Policy.fit(INDEXER, H100, rows)

    bigger = Batch.verify([20000] * 16, 2)
    assert REGIME(bigger) != REGIME(failed)
    assert "flatten/deep_gemm" in policy.survey(bigger).forbidden
    assert "flatten/deep_gemm" not in policy.survey(Batch.verify([20000] * 16, 3)).forbidden
