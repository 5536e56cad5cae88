"""Straight-line code for the decisions of one kind of batch.

Choosing by `pick` asks every guard, evaluates every cost term and compares every arm, which takes
a dozen microseconds in Python. All of that is arithmetic on a batch's sums, and the same for every
batch of a mode: so it is traced once (`tracing.py`) and written down as one function, with the
guards' own limits and the models' weights as constants. A point whose guards or terms cannot be
followed, or of which too little is measured, is asked in the slow way, which answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.dispatch.plan import DECIDED, Plan, PlanDraft
from nsa_tune.backend.dispatch.point_code import BODY, Asked, Kind, PointCode, Question
from nsa_tune.backend.dispatch.source import Writer
from nsa_tune.backend.dispatch.tracing import SymbolicBatch, Trace, Untraceable
from nsa_tune.backend.types.batch import Batch, Mode

if TYPE_CHECKING:
    from nsa_tune.backend.costmodel.policy import Policy

__all__ = ["choice_function", "plan_function"]


def plan_function(
    asked: Sequence[Asked],
    kind: Kind,
    held: Mapping[tuple[object, ...], tuple[object, ...]],
    slow: Callable[[Batch], Plan],
    other: Callable[[Batch], Plan],
) -> Callable[[Batch], Plan] | None:
    """The function from a batch of this kind to its plan; None when it cannot be written.

    Batches whose lengths are known, where the kind has none, or not known go to `other`.
    `held` has what a plan holds besides its batch, by the choices and, in extend, by `facts_of`.
    Outside of extend the batch must not be captured.
    """
    names = [question.answer.name for one in asked for question in one.questions]
    key = "".join(f"{name}, " for name in names)
    if kind.mode is Mode.EXTEND:
        topk = asked[0].policy.setting.profile.index_topk if asked else 0
        key += f"batch.kv_tokens > batch.q_tokens, batch.max_kv <= {topk}"
    tail = [
        "plan = Draft()",
        "plan.batch = batch",
        f"{', '.join(f'plan.{name}' for name in (*DECIDED, '_origin'))} = held[{key}]",
        "plan.__class__ = Plan",
        "return plan",
    ]
    known: dict[str, object] = {
        "Draft": PlanDraft,
        "Plan": Plan,
        "held": held,
    }
    known |= {"slow": slow, "other": other}
    head = [f"if batch.kv_lens is {_absent(kind)}: return other(batch)"]
    return _function(asked, kind, tail, known, head) if asked else None


def choice_function(
    policy: Policy, question: Question, kind: Kind, slow: Callable[[Batch], str | None]
) -> Callable[[Batch], str | None] | None:
    """The function from a batch to the choice for one question; the slow way for other kinds."""
    other = f"batch.mode is not mode or batch.kv_lens is {_absent(kind)}"
    if kind.mode is not Mode.EXTEND:
        other += f" or batch.next_n != {kind.next_n} or batch.captured"
    return _function(
        [Asked(policy, (question,))],
        kind,
        [f"return {question.answer.name}"],
        {"slow": slow, "mode": kind.mode},
        [f"if {other}: return slow(batch)"],
    )


def _absent(kind: Kind) -> str:
    return "None" if kind.has_lens else "not None"


def _function(
    asked: Sequence[Asked], kind: Kind, tail: Sequence[str], names: Mapping[str, object],
    head: Sequence[str] = (),
) -> Callable[[Batch], Any] | None:  # fmt: skip
    trace = Trace()
    # A captured size has a plan of its own, except in extend.
    captured = None if kind.mode is Mode.EXTEND else False
    batch = SymbolicBatch(trace, kind.mode, kind.next_n, captured, kind.has_lens)
    writer = Writer(trace)
    helpers: dict[str, object] = {"inf": inf, **names}
    for line in head:
        writer.line(line, BODY)
    for i, one in enumerate(asked):
        PointCode(trace, batch, writer, one, kind, i, helpers).write()
    try:
        return writer.function(tail, helpers)
    except Untraceable:
        return None
