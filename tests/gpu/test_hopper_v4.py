"""V4's Hopper arms against the reference, on the GPU itself: ``pytest -m gpu`` on a Hopper."""

from __future__ import annotations

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.autotune.bench import devices
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(providers.answering("flash_mla") is None, reason="needs flash_mla"),
]

BATCHES = [
    Batch.extend([0], [1]),
    Batch.extend([0], [300]),
    Batch.extend([700, 3, 0, 100000], [40, 9, 130, 257]),
    Batch.extend([30000] * 4, [1024] * 4),
]
V4 = [point.name for point in points_for(profile_of("deepseek-v4"))]


@pytest.mark.parametrize("name", V4)
@pytest.mark.parametrize(
    ("model", "heads"), [("deepseek-v4", 128), ("deepseek-v4", 16), ("deepseek-v4-flash", 64)]
)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_v4_prefill_arms(name: str, model: str, heads: int, batch: Batch) -> None:
    device, profile, point = torch.device("cuda:0"), profile_of(model), POINTS[name]
    libraries = dict(detect.library_versions())
    setting = Setting(profile, heads, profile.layout("fp8"), devices.describe(device), libraries)
    case = point.case(batch, setting, device)
    arms = list(point.candidates(setting))

    assert [arm.name for arm in arms] == ["sparse_fwd", "with_kvcache"]
    for arm in arms:
        assert arm.allowed(batch, setting) is None
        assert case.error_of(arm.build(case)()) <= case.tolerance, arm.name
