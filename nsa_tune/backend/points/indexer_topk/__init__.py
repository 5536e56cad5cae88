"""Decision point `indexer_topk`: which kernel selects the keys that a query attends to.

In each layer the indexer scores every key that a query sees, and the index_topk largest scores of
each row are selected. A row is a query token in every mode. What is timed is the selection as
places in a sequence; every kernel can look them up in a page table, or shift them, in passing.
"""

from __future__ import annotations

from nsa_tune.backend.points.indexer_topk import arms, batches, features
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question, case_in

INDEXER_TOPK = Point(
    name="indexer_topk",
    modes=frozenset(Mode),
    arms=arms.ARMS,
    questions=(Question("indexer_topk", {arm.name: (arm.name,) for arm in arms.ARMS}),),
    features=features.features,
    regimes_alike=2,
    grid=batches.grid,
    case=case_in("indexer_topk.case", "TopkCase"),
    sample=batches.sample,
)
