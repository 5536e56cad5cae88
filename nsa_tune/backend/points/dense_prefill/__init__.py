"""Decision point `dense_prefill`: expanded MHA or absorbed MLA over all tokens, by which kernel.

An arm's time is everything that only this way costs in one layer. MHA reads the prefix back, runs
kv_b_proj over all kv tokens, builds the keys and runs dense attention: at once, or the new tokens
and the prefix in chunks, whose outputs it merges. MLA absorbs q, attends to the pool and projects
to v. The batches are those of `prefill`.
"""

from __future__ import annotations

from nsa_tune.backend.points.dense_prefill import features
from nsa_tune.backend.points.dense_prefill.arms import MHA, MLA
from nsa_tune.backend.points.prefill import PREFILL, batches, questions
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point

__all__ = ["DENSE_PREFILL"]

DENSE_PREFILL = Point(
    name="dense_prefill",
    modes=frozenset({Mode.EXTEND}),
    arms=(*MHA, *MLA),
    questions=questions(MHA, MLA, "absorbed_prefill"),
    features=features.features,
    grid=batches.grid,
    case=PREFILL.case,
    sample=batches.sample,
    families=frozenset({"mla"}),
    corrected=True,
)
