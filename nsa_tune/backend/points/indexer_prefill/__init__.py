"""Decision point `indexer_prefill`: how a prefill's indexer scores the keys of its queries.

`ragged` gathers the keys of all sequences and scores them in one call, `chunked` so many queries at
a time that the logits stay within a budget, and `paged` reads the keys where they lie, with a row
of the block table for each query. Its schedule is a cost of the pass, like the repeated table, and
not in the time. What follows, the selection, is `indexer_topk`.
"""

from __future__ import annotations

from nsa_tune.backend.points.indexer_prefill import arms, batches, features
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question, case_in

INDEXER_PREFILL = Point(
    name="indexer_prefill",
    modes=frozenset({Mode.EXTEND}),
    arms=arms.ARMS,
    questions=(Question("indexer_prefill", {arm.name: (arm.name,) for arm in arms.ARMS}),),
    features=features.features,
    grid=batches.grid,
    case=case_in("indexer_prefill.case", "LogitsCase"),
    sample=batches.sample,
)
