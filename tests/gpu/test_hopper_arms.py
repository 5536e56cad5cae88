"""Every Hopper arm against the reference, on the GPU itself: ``pytest -m gpu`` on a Hopper."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.autotune.bench import devices
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

_log = logging.getLogger(__name__)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
MISSING = [name for name in providers.PROVIDERS if providers.answering(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    # SGLang 0.5.17's tilelang kernel calls what tilelang 0.1.11 wants named otherwise.
    pytest.mark.filterwarnings(r"ignore:T\.symbolic:DeprecationWarning"),
]

PREFILLS = [
    Batch.extend([0], [300]),
    Batch.extend([1920], [128]),
    Batch.extend([0, 512, 100], [300, 64, 1]),
    Batch.extend([8192], [512]),
]
VERIFIES = [
    Batch.verify([8192] * 64, 2),
    Batch.verify([4096, 100, 9000], 4),
    Batch.verify([4096] * 7, 3),
]
DECODES = [
    Batch.decode([5000]),
    Batch.decode([300, 2048, 40000, 1]),
    Batch.verify([8191, 100, 9000] * 20, 4),
]
SCHEDULES = [
    Batch.decode([5]),
    Batch.verify([9000, 4096, 77] * 11, 2),
    Batch.extend([0], [1000]),
    Batch.extend([5000], [4096]),
]


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture(scope="module")
def setting(device: torch.device) -> Setting:
    return Setting(
        profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, devices.describe(device),
        dict(detect.library_versions()),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
@pytest.mark.parametrize(
    ("heads", "overlap"), [(128, None), (64, None), (32, 0.8), (16, None), (8, 0.9)]
)
@pytest.mark.parametrize("batch", PREFILLS, ids=str)
def test_prefill_arms(
    setting: Setting, device: torch.device, layout: KVLayout, heads: int, overlap: float | None,
    batch: Batch,
) -> None:  # fmt: skip
    check("prefill", replace(setting, layout=layout, heads=heads, overlap=overlap), device, batch)


@pytest.mark.parametrize("batch", VERIFIES, ids=str)
def test_indexer_arms(setting: Setting, device: torch.device, batch: Batch) -> None:
    check("indexer_layout", setting, device, batch)


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
@pytest.mark.parametrize("heads", [128, 64, 16])
@pytest.mark.parametrize("batch", DECODES, ids=str)
def test_decode_arms(
    setting: Setting, device: torch.device, layout: KVLayout, heads: int, batch: Batch
) -> None:
    check("decode", replace(setting, layout=layout, heads=heads), device, batch)


@pytest.mark.parametrize("batch", SCHEDULES, ids=str)
def test_schedules_are_deep_gemms_bit_for_bit(
    setting: Setting, device: torch.device, batch: Batch
) -> None:
    check("indexer_metadata", setting, device, batch)


def check(name: str, setting: Setting, device: torch.device, batch: Batch) -> None:
    point = POINTS[name]
    case = point.case(batch, setting, device)
    ran = 0
    for arm in point.candidates(setting):
        if arm.allowed(batch, setting) is None:
            error = case.error_of(arm.build(case)())
            _log.info("%s %s on %s: error %.3g", name, arm.name, batch, error)
            assert error <= case.tolerance, arm.name
            ran += 1
    assert ran
