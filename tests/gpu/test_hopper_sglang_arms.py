"""SGLang's own kernels against the reference, on the GPU itself: ``pytest -m gpu`` on a Hopper.

Each arm needs its own library alone, so that it is tested where others are missing.
"""

from __future__ import annotations

import logging

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.autotune.bench import devices
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.attention_case import prefill_case

_log = logging.getLogger(__name__)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    # SGLang's kernels call TileLang by names that TileLang has renamed.
    pytest.mark.filterwarnings("ignore:.* is deprecated, use .* instead:DeprecationWarning"),
]

PREFILLS = [
    Batch.extend([0], [1]),
    Batch.extend([0], [300]),
    Batch.extend([1920], [128]),
    Batch.extend([0, 512, 100], [300, 64, 1]),
    Batch.extend([8192], [512]),
]
CASES = [
    *(
        ("prefill", f"mla/triton_sparse_mla{union}", kv_dtype, batch)
        for union in ("", "_union4")
        for kv_dtype in ("bf16", "fp8")
        for batch in PREFILLS
    ),
]


@pytest.mark.parametrize("heads", [128, 64, 16, 8])
@pytest.mark.parametrize(("name", "arm_name", "kv_dtype", "batch"), CASES, ids=str)
def test_an_arm_of_sglang(
    name: str, arm_name: str, kv_dtype: str, batch: Batch, heads: int
) -> None:
    arm = POINTS[name].arm(arm_name)
    assert arm.requires is not None
    if providers.answering(arm.requires) is None:
        pytest.skip(f"needs {arm.requires}")
    device = torch.device("cuda:0")
    setting = devices.setting_of(device, "deepseek-v3.2", heads, kv_dtype)
    assert arm in POINTS[name].candidates(setting)
    reason = arm.allowed(batch, setting)
    if reason is not None and "heads" in reason:
        pytest.skip(reason)
    assert reason is None
    case = prefill_case(batch, setting, device)

    run = arm.build(case)
    run()
    error = case.error_of(run())

    _log.info("%s with %d heads on %s: error %.3g", arm.name, heads, batch, error)
    assert error <= case.tolerance
