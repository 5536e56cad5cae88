"""Decision points `v4_prefill_c4` and `v4_prefill_c128`: how a DeepSeek V4 prefill attends to its
window and its compressed tokens, in the layers of either compression ratio.

An arm's time is everything that only this way costs in one layer. `sparse_fwd` gathers and
dequantizes window and compressed tokens into a bf16 workspace, combines both index lists into one
and runs the prefill kernel; its time grows with the history. `with_kvcache` runs the decode kernel
over the two paged pools, one row a query. The two ratios are two points, because each layer has one
ratio and the best choices differ; the batches are the same.
"""

from __future__ import annotations

from functools import partial

from nsa_tune.backend.points.v4_prefill import batches, features
from nsa_tune.backend.points.v4_prefill.arms import arms_of
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Point, Question, case_in

_RATIOS = (4, 128)


def _point(ratio: int) -> Point:
    name = f"v4_prefill_c{ratio}"
    arms = arms_of(ratio)
    return Point(
        name=name,
        modes=frozenset({Mode.EXTEND}),
        arms=arms,
        questions=(Question(name, {arm.name: (arm.name,) for arm in arms}),),
        features=partial(features.features, ratio=ratio),
        grid=batches.grid,
        case=partial(case_in("v4_prefill.case", "V4PrefillCase"), ratio),
        sample=batches.sample,
        families=frozenset({"v4"}),
        group="v4_prefill",
    )


V4_PREFILL: tuple[Point, ...] = tuple(map(_point, _RATIOS))
"""One point for each compression ratio."""
