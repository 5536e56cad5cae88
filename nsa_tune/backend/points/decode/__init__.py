"""Decision point `decode`: which sparse attention kernel decodes and verifies.

An arm is the work of one layer without the indexer: absorb q, attend to each row's selected
tokens, project to v. A row is a query token, because engines pass the next_n queries of a sequence
as separate rows. What an arm reads has the same size at any context, so a CUDA graph can hold any
of them. The input tensors are those of a prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_tune.backend.points.decode import batches, features
from nsa_tune.backend.points.decode.arms import ARMS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Case, Point, Question, Setting

if TYPE_CHECKING:
    import torch


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.attention_case import prefill_case

    return prefill_case(batch, setting, device)


DECODE = Point(
    name="decode",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND}),
    arms=ARMS,
    questions=(Question("decode", {arm.name: (arm.name,) for arm in ARMS}),),
    features=features.features,
    grid=batches.grid,
    case=_case,
    sample=batches.sample,
)
