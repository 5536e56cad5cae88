"""The indexer's prefill logits and its selection on a Hopper GPU: ``pytest -m gpu``."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.autotune.bench import devices
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.indexer_prefill.arms import chunks
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

_log = logging.getLogger(__name__)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
MISSING = [
    name
    for name in ("deep_gemm", "flashinfer", "sglang_kernel")
    if providers.answering(name) is None
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

SELECTIONS = [
    Batch.decode([2049]),
    Batch.decode([5000, 300, 2048, 131072, 1]),
    Batch.verify([8191, 100, 9000] * 20, 4),
    Batch.draft_extend([3000] * 7, 2),
    Batch.extend([0], [4097]),
    Batch.extend([30000, 0, 5], [777, 100, 3000]),
    # 2048 rows of up to 65536 scores.
    Batch.extend([63488], [2048]),
]
LOGITS = [
    Batch.extend([0], [2049]),
    Batch.extend([5001], [1]),
    Batch.extend([3000, 0, 777], [40, 1001, 3]),
    Batch.extend([30000], [8191]),
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


@pytest.mark.parametrize("name", ["sglang", "sampled", "flashinfer", "torch"])
@pytest.mark.parametrize("batch", SELECTIONS, ids=str)
def test_selections_are_exact(
    setting: Setting, device: torch.device, batch: Batch, name: str
) -> None:
    point = POINTS["indexer_topk"]
    case = point.case(batch, setting, device)

    assert point.arm(name).allowed(batch, setting) is None
    assert case.error_of(point.arm(name).build(case)()) == 0


CONTENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ties": lambda scores: (2 * scores).round(),
    "flat": lambda scores: 1 + 0.2 * scores.sigmoid(),
    "mostly zero": lambda scores: scores * (scores > 1.9),
    "equal": torch.zeros_like,
}


@pytest.mark.parametrize("name", ["sampled", "flashinfer"])
@pytest.mark.parametrize("content", CONTENTS)
def test_selections_are_exact_whatever_the_scores_are(
    setting: Setting, device: torch.device, name: str, content: str
) -> None:
    """Of such rows `sglang` drops candidates."""
    point = POINTS["indexer_topk"]
    case = point.case(Batch.extend([30000], [500]), setting, device)
    case.padded.copy_(CONTENTS[content](case.padded))  # type: ignore[attr-defined]

    assert case.error_of(point.arm(name).build(case)()) == 0


@pytest.mark.parametrize("name", ["ragged", "paged", "chunked", "torch"])
@pytest.mark.parametrize("batch", LOGITS, ids=str)
def test_logits(setting: Setting, device: torch.device, batch: Batch, name: str) -> None:
    if name == "torch" and batch.q_tokens > 4000:
        pytest.skip("its products take more than the memory")
    point = POINTS["indexer_prefill"]
    case = point.case(batch, setting, device)
    if name == "chunked":
        case.rows_a_chunk = min(case.rows_a_chunk, 333)  # type: ignore[attr-defined]
    error = case.error_of(point.arm(name).build(case)())
    _log.info("%s on %s: error %.3g", name, batch, error)
    assert error < case.tolerance


def test_every_chunk_is_right(setting: Setting, device: torch.device) -> None:
    case = POINTS["indexer_prefill"].case(LOGITS[2], setting, device)
    case.rows_a_chunk = 101  # type: ignore[attr-defined]

    for start, part in chunks(case):  # type: ignore[arg-type]
        assert case.error_from(part, start) < case.tolerance  # type: ignore[attr-defined]


def test_gathered_keys_are_the_references(setting: Setting, device: torch.device) -> None:
    from nsa_tune.backend.kernels.gather_keys import gather_keys, gather_keys_reference

    case = POINTS["indexer_prefill"].case(LOGITS[2], setting, device)
    given = gather_keys(case.pool, case.slots)  # type: ignore[attr-defined]
    wanted = gather_keys_reference(case.pool, case.slots)  # type: ignore[attr-defined]

    assert torch.equal(given[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(given[1], wanted[1])
