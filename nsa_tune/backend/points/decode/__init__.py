"""Decision point `decode`: which sparse attention kernel decodes and verifies.

An arm is the work of one layer without the indexer: absorb q, attend to each row's selected
tokens, project to v. A row is a query token, because engines pass the next_n queries of a sequence
as separate rows. What an arm reads has the same size at any context, so a CUDA graph can hold any
of them. The input tensors are those of a prefill.
"""

from __future__ import annotations

from nsa_tune.backend.points.decode import batches, features
from nsa_tune.backend.points.decode.arms import ARMS
from nsa_tune.backend.points.prefill import PREFILL
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question

DECODE = Point(
    name="decode",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND}),
    arms=ARMS,
    questions=(Question("decode", {arm.name: (arm.name,) for arm in ARMS}),),
    features=features.features,
    grid=batches.grid,
    case=PREFILL.case,
    sample=batches.sample,
)
