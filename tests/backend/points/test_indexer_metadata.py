"""The indexer_metadata point: exact schedules only, and a limit of rows for DeepGEMM alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.indexer_metadata.case import MetadataCase
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

METADATA = POINTS["indexer_metadata"]
CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
H100 = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H100 80GB HBM3"],
    {"sgl-deep-gemm": "0.1.5.post1"},
)  # fmt: skip
BATCHES = [Batch.decode([5]), Batch.verify([400, 3000], 2), Batch.extend([700, 0], [300, 41])]


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_both_schedules_are_exact(batch: Batch, name: str) -> None:
    case = MetadataCase(batch, TINY, CPU)
    output = METADATA.arm(name).build(case)()

    assert output.shape == (case.sms + 1, 2)
    assert case.error_of(output) == 0


def test_each_row_sees_the_keys_up_to_its_own() -> None:
    case = MetadataCase(Batch.extend([700, 0], [2, 3]), TINY, CPU)

    assert case.context_lens.flatten().tolist() == [701, 702, 1, 2, 3]


def test_a_schedule_that_is_off_by_one_is_wrong() -> None:
    case = MetadataCase(BATCHES[1], TINY, CPU)
    output = METADATA.arm("torch").build(case)()
    output[3, 1] += 1

    assert case.error_of(output) == float("inf") > case.tolerance


@pytest.mark.parametrize(
    ("rows", "version", "allowed"),
    [
        (58112, "0.1.5.post1", ["deep_gemm", "triton"]),
        (58113, "0.1.5.post1", ["triton"]),
        (14496, "0.1.0", ["deep_gemm", "triton"]),
        (14497, "0.1.0", ["triton"]),
    ],
)
def test_deep_gemm_has_a_limit_of_rows_and_triton_has_none(
    rows: int, version: str, allowed: list[str]
) -> None:
    setting = replace(H100, libraries={"sgl-deep-gemm": version})
    batch = Batch.extend([0], [rows])

    arms = [arm for arm in METADATA.candidates(setting) if arm.allowed(batch, setting) is None]
    assert [arm.name for arm in arms] == allowed


def test_the_grid_compiles_few_kernels_and_passes_deep_gemms_limit() -> None:
    grid = METADATA.grid(H100)

    assert 50 <= len(grid) <= 150
    assert len({-(-batch.q_tokens // 32) for batch in grid}) <= 16
    assert max(batch.q_tokens for batch in grid) > 58112
    assert len({str(batch) for batch in grid}) == len(grid)


def test_samples_compile_no_further_kernel() -> None:
    random = Random(1)
    buckets = {-(-batch.q_tokens // 32) for batch in METADATA.grid(H100)}
    drawn = [METADATA.sample(H100, random) for _ in range(60)]

    assert {-(-batch.q_tokens // 32) for batch in drawn} <= buckets
