"""Decision point `dense_decode`: which absorbed kernel decodes and verifies over all tokens.

An arm is the work of one layer: absorb q, attend to the pool, project to v. The input tensors are
those of a prefill, and the batches those of `decode`.
"""

from __future__ import annotations

from nsa_tune.backend.points.decode import DECODE, batches
from nsa_tune.backend.points.dense_decode import features
from nsa_tune.backend.points.dense_decode.arms import ARMS
from nsa_tune.backend.types.point import Point, Question

__all__ = ["DENSE_DECODE"]

DENSE_DECODE = Point(
    name="dense_decode",
    modes=DECODE.modes,
    arms=ARMS,
    questions=(Question("decode", {arm.name: (arm.name,) for arm in ARMS}),),
    features=features.features,
    grid=batches.grid,
    case=DECODE.case,
    sample=batches.sample,
    families=frozenset({"mla"}),
    corrected=True,
)
