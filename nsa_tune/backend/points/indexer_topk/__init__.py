"""Decision point `indexer_topk`: which kernel selects the keys that a query attends to.

In each layer the indexer scores every key that a query sees, and the index_topk largest scores of
each row are selected. A row is a query token in every mode. What is timed is the selection as
places in a sequence; every kernel can look them up in a page table, or shift them, in passing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_tune.backend.points.indexer_topk import arms, batches, features
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Case, Point, Question, Setting

if TYPE_CHECKING:
    import torch


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.indexer_topk.case import TopkCase

    return TopkCase(batch, setting, device)


INDEXER_TOPK = Point(
    name="indexer_topk",
    modes=frozenset(Mode),
    arms=arms.ARMS,
    questions=(Question("indexer_topk", {arm.name: (arm.name,) for arm in arms.ARMS}),),
    features=features.features,
    regimes_alike=2,
    grid=batches.grid,
    case=_case,
    sample=batches.sample,
)
