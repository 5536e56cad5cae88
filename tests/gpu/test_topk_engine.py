"""The selection of an engine's prefill on a GPU: ``pytest -m gpu``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks.topk_engine import TOPK, Kernels, Method, Shape, differing, given_for
from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.backend.kernels.topk_transform import transform_reference
from nsa_tune.engines.sglang.topk.calibration import check, measure
from nsa_tune.engines.sglang.topk.call import call_of, selection_of

AMPERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not AMPERE, reason="needs a GPU from SM80"),
]
SHAPES = [
    Shape(0, 4096),
    Shape(30720, 64),
    Shape(30721, 1001),
    Shape(70001, 300),
    Shape(5000, 333, 5),
    Shape(5000, 333, 5, chunk=700),
    Shape(100, 50, 3),
    Shape(30721, 1001, method="RAGGED"),
    Shape(5000, 333, 5, "RAGGED", 700),
]


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda:0")


def test_every_variant_selects_right(device: torch.device) -> None:
    check(TOPK, device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prefill_gets_its_largest_scores(shape: Shape, device: torch.device) -> None:
    given = given_for(shape, Method, device)
    call = call_of(given)
    assert call is not None

    chosen = selection_of(call)(call.logits)

    places = sampled_topk_reference(call.logits, call.lengths, TOPK, call.row_starts)
    assert differing(given, chosen, transform_reference(places, call.transform)) == 0
    assert ((chosen >= 0).sum(1) == call.lengths.clamp_max(TOPK)).all()


@pytest.mark.skipif(find_spec("sgl_kernel") is None, reason="needs sglang-kernel")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sglangs_kernels_select_the_same(shape: Shape, device: torch.device) -> None:
    given = given_for(shape, Method, device)
    call = call_of(given)
    assert call is not None

    assert differing(given, Kernels().topk_transform(**given), selection_of(call)(call.logits)) == 0


@pytest.mark.skipif(find_spec("sgl_kernel") is None, reason="needs sglang-kernel")
def test_both_are_measured(device: torch.device) -> None:
    kernels = Kernels()
    times = list(
        measure(
            lambda _, **given: kernels.topk_transform(**given), None, TOPK, Method.PAGED, device
        )
    )

    assert times and all(min(one.engine_us, one.own_us) > 0 for one in times)
