"""The comparison of SGLang's top-k with the plug-in's: its inputs, and what it takes for equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.topk_engine import SHAPES, TOPK, Method, Shape, differing, given_for
from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.backend.kernels.topk_transform import transform_reference
from nsa_tune.engines.sglang.topk.call import call_of

CPU = torch.device("cpu")
SMALL = [
    Shape(3000, 40),
    Shape(0, 2500),
    Shape(2200, 30, 3),
    Shape(2200, 30, 3, chunk=50),
    Shape(2200, 30, 3, "RAGGED"),
    Shape(2200, 30, 3, "RAGGED", 50),
]


def slots(given: dict[str, Any]) -> torch.Tensor:
    """What SGLang's kernels select, by the tables of slots that they are passed."""
    places = sampled_topk_reference(given["logits"], given["lengths"], TOPK, given["row_starts"])
    if given["topk_transform_method"] is Method.RAGGED:
        return torch.where(places < 0, -1, places + given["topk_indices_offset"][:, None])
    rows = torch.arange(len(places))
    sequence = torch.searchsorted(given["cu_seqlens_q_topk"], rows, right=True) - 1
    table = given["attn_metadata"].page_table_1
    if given["batch_idx_list"] is not None:
        table = table[given["batch_idx_list"]]
    return torch.where(places < 0, -1, table[sequence].gather(1, places.clamp_min(0).long()))


def own(given: dict[str, Any]) -> torch.Tensor:
    call = call_of(given)
    assert call is not None
    places = sampled_topk_reference(call.logits, call.lengths, call.topk, call.row_starts)
    return transform_reference(places, call.transform)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_both_are_asked_for_the_same(shape: Shape) -> None:
    given = given_for(shape, Method, CPU)

    assert torch.equal(slots(given), own(given))
    assert differing(given, slots(given), own(given).flip(1)) == 0


def test_other_keys_with_equal_scores_are_as_good() -> None:
    given = given_for(Shape(3000, 4), Method, CPU)
    given["logits"][:] = 1.0
    first, second = own(given), own(given)
    for row in second:
        others = set(given["attn_metadata"].page_table_1[0, :3001].tolist()) - set(row.tolist())
        row[0] = others.pop()

    assert differing(given, first, second) == 0


def test_a_row_that_lacks_a_larger_score_is_told() -> None:
    given = given_for(Shape(3000, 4), Method, CPU)
    first, second = own(given), own(given)
    others = set(given["attn_metadata"].page_table_1[0, :3001].tolist()) - set(second[2].tolist())
    second[2, 0] = others.pop()

    assert differing(given, first, second) == 1


def test_each_shape_has_something_to_select() -> None:
    assert all(shape.prefix + shape.new > TOPK for shape in SHAPES if shape.sequences != 4)
    assert len({str(shape) for shape in SHAPES}) == len(SHAPES)
