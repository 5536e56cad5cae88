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
from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.points import LOSSY, POINTS
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
    *(("prefill", "mla/flashmla_sparse_q8", "fp8", batch) for batch in PREFILLS),
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
    setting = devices.setting_of(device, "deepseek-v3.2", heads, kv_dtype, frozenset(LOSSY))
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
    assert error <= (case.tolerance if arm.tolerance is None else arm.tolerance)


@pytest.mark.parametrize("batch", PREFILLS[2:], ids=str)
def test_the_fp8_arm_is_off_by_what_its_roundings_alone_leave(batch: Batch) -> None:
    if providers.answering("sglang_q8") is None:
        pytest.skip("needs sglang_q8")
    device = torch.device("cuda:0")
    setting = devices.setting_of(device, "deepseek-v3.2", 128, "fp8", frozenset(LOSSY))
    case = prefill_case(batch, setting, device)
    point = POINTS["prefill"]

    found = case.error_of(point.arm("mla/flashmla_sparse_q8").build(case)())
    alone = case.error_of(point.arm("mla/torch_sparse_q8").build(case)())

    _log.info("fp8 kernel %.3g, its roundings in torch %.3g", found, alone)
    assert 0.5 * alone < found < 1.5 * alone


def test_tokens_are_narrowed_as_the_reference_says() -> None:
    device = torch.device("cuda:0")
    latents = torch.randn(4096, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    latents[::3] *= 300
    pool = packed_fp8.quantize_reference(latents, 512).to(device)
    slots = torch.randperm(4096, device=device)[:3001].int()

    narrow = packed_fp8.narrow(pool, slots, 512, 64, 2048)

    right = packed_fp8.narrow_reference(pool, slots, 512, 64, 2048)
    assert torch.equal(narrow.float(), right.float())
