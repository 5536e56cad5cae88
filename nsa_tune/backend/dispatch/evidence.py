"""The evidence of a decision: what it rests on, what it may cost, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Protocol

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import expected_regret
from nsa_tune.backend.dispatch.decide import Choice, Verdict
from nsa_tune.backend.dispatch.plan import Consulted, Reason, Row
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.lengths import MAX_TOKENS
from nsa_tune.backend.types.point import Question
from nsa_tune.backend.types.records import Key

_AXES = {
    Mode.EXTEND: ("new tokens", "prefix tokens", "sequences"),
    Mode.DECODE: ("context tokens", "sequences"),
    Mode.TARGET_VERIFY: ("context tokens", "sequences"),
    Mode.DRAFT_EXTEND: ("context tokens", "sequences"),
}
"""What is changed, one at a time and for all sequences alike, to find where another choice wins."""
_STEPS = 48
"""Quarter octaves that are gone either way."""
_MOST_ROWS = 2**18
"""New tokens up to which they are: no engine's chunk has more, and V4's features take time by row.
"""


class Decider(Protocol):
    """Who made a choice, and would make others."""

    @property
    def key(self) -> Key | None:
        """What its measurements are valid for."""

    def question(self, mode: Mode, name: str) -> tuple[Policy, Question]:
        """A question, and the policy that answers it."""

    def choosers(
        self, names: tuple[str, ...], mode: Mode
    ) -> Callable[[Batch], tuple[str | None, ...]]:
        """The function that answers questions."""


def certified(reason: Reason, choice: Choice, planner: Decider, batch: Batch) -> Reason:
    """`reason` with all that `choice` rests on."""
    policy, question = planner.question(batch.mode, choice.question)
    measured = choice.verdict not in (Verdict.BASELINE, Verdict.NONE)
    return replace(
        reason,
        key=planner.key if measured else None,
        rows=tuple(_rows(policy, choice, batch)),
        consulted=tuple(_consulted(policy, question, batch)),
        expected_regret=_regret(choice),
        to_win=dict(_to_win(choice, planner, batch)),
    )


def _rows(policy: Policy, choice: Choice, batch: Batch) -> Iterator[Row]:
    """The measurements that the estimates are interpolated from, by arm and weight."""
    for name in choice.estimates:
        arm = choice.arms[name]
        for measurement, weight in policy.rows_used(arm, batch):
            assert measurement.latency_us is not None
            yield Row(measurement.batch, arm, measurement.latency_us, weight, measurement.pass_us)


def _consulted(policy: Policy, answer: Question, batch: Batch) -> Iterator[Consulted]:
    """Every guard of the question's arms, up to the one that forbids the arm."""
    arms = {arm for names in answer.choices.values() for arm in names}
    for candidate in policy.candidates:
        if candidate.name in arms:
            for guard in candidate.guards:
                reason = guard.check(batch, policy.setting)
                yield Consulted(candidate.name, guard.name, guard.kind, guard.source, reason)
                if reason is not None:
                    break


# --- what it may cost


def _regret(choice: Choice) -> float | None:
    taken = choice.estimates.get(choice.choice or "")
    others = [estimate for name, estimate in choice.estimates.items() if name != choice.choice]
    if taken is None or not others:
        return None
    return max(expected_regret(taken, other) for other in others)


# --- what would change it


def _to_win(choice: Choice, planner: Decider, batch: Batch) -> Iterator[tuple[str, str]]:
    """For each other choice that this device has an arm for, what would have to be different."""
    policy, question = planner.question(batch.mode, choice.question)
    here = {candidate.name for candidate in policy.candidates}
    others = {
        name: arms
        for name, arms in question.choices.items()
        if name != choice.choice and not here.isdisjoint(arms)
    }
    # Far enough away, limits leave a choice alone; that it wins there unmeasured says nothing.
    measured = {row.arm for row in policy.rows}
    able = {name for name, arms in others.items() if not measured.isdisjoint(arms)}
    turns = _turns(choice.question, planner, batch, able)
    taken = choice.estimates.get(choice.choice or "")
    for name in others:
        changes = [turns[name]] if name in turns else []
        if taken and name in choice.estimates:
            saved = 1 - taken.latency_us / choice.estimates[name].latency_us
            if saved > 0.0005:
                changes.insert(0, f"{saved:.1%} less time")
        if changes and name in choice.forbidden:
            changes = [f"{changes[0]}, where no limit forbids it"]
        if changes:
            yield name, ", or ".join(changes)


def _turns(name: str, planner: Decider, batch: Batch, wanted: set[str]) -> Mapping[str, str]:
    """For each choice the nearest change of one length that makes it win.

    A captured size is decided for all its contexts, so it has none.
    """
    if not wanted or (batch.captured and batch.mode is not Mode.EXTEND):
        return {}
    choose = planner.choosers((name,), batch.mode)
    nearest: dict[str, tuple[int, str]] = {}
    for axis in _AXES[batch.mode]:
        here = _size(batch, axis)
        for sizes in (_sizes(here, 1), _sizes(here, -1)):
            last = here
            for step, size in enumerate(sizes):
                other = moved(batch, axis, size)
                if other is None or other.q_tokens > max(batch.q_tokens, _MOST_ROWS):
                    break
                (choice,) = choose(other)
                if choice in wanted and step < nearest.get(choice, (_STEPS + 1, ""))[0]:
                    first = _first(batch, axis, choose, choice, last, size)
                    nearest[choice] = (step, f"{_amount(first, axis, batch)} instead of {here}")
                last = size
    return {choice: text for choice, (_, text) in nearest.items()}


def _size(batch: Batch, axis: str) -> int:
    """The length of a sequence, on average, or their count."""
    if axis == "sequences":
        return batch.batch_size
    tokens = {
        "new tokens": batch.q_tokens,
        "prefix tokens": batch.prefix_tokens,
        "context tokens": batch.kv_tokens,
    }[axis]
    return round(tokens / batch.batch_size)


def _sizes(here: int, sign: int) -> list[int]:
    """Sizes from `here` on, upwards or downwards, in quarter octaves."""
    start = max(here, 1)
    sizes = [round(start * 2 ** (sign * step / 4)) for step in range(1, _STEPS + 1)]
    return [size for size in dict.fromkeys(sizes) if size != here]


def moved(batch: Batch, axis: str, size: int) -> Batch | None:
    """The sums of `batch` with this length in all sequences, or this count; None if that is none.

    A ragged batch keeps its raggedness: all its sequences grow or shrink alike.
    """
    count, longest = batch.batch_size, batch.max_kv
    if axis == "sequences":
        count = size
        q_tokens = round(batch.q_tokens / batch.batch_size * size)
        kv_tokens = round(batch.kv_tokens / batch.batch_size * size)
    else:
        more = size - _size(batch, axis)
        q_tokens = batch.q_tokens + (more * count if axis == "new tokens" else 0)
        kv_tokens, longest = batch.kv_tokens + more * count, longest + more
    if not (1 <= count <= q_tokens <= kv_tokens <= MAX_TOKENS):
        return None
    longest = min(max(longest, ceil(kv_tokens / count)), kv_tokens - count + 1)
    pairs = _equal_pairs(count, q_tokens, kv_tokens) * (
        batch.pairs / _equal_pairs(batch.batch_size, batch.q_tokens, batch.kv_tokens)
    )
    return Batch.from_totals(
        mode=batch.mode,
        batch_size=count,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        max_kv=longest,
        pairs=min(max(round(pairs), q_tokens), q_tokens * longest),
        next_n=batch.next_n,
        captured=batch.captured,
    )


def _equal_pairs(count: int, q_tokens: int, kv_tokens: int) -> float:
    return q_tokens * ((kv_tokens - q_tokens) / count + (q_tokens / count + 1) / 2)


def _first(
    batch: Batch, axis: str, choose: Callable[[Batch], tuple[str | None, ...]], choice: str,
    near: int, far: int,
) -> int:  # fmt: skip
    """The size nearest to `near` on the way to `far` from which on `choice` wins."""
    while abs(far - near) > 1:
        middle = (near + far) // 2
        other = moved(batch, axis, middle)
        if other is not None and choose(other) == (choice,):
            far = middle
        else:
            near = middle
    return far


def _amount(size: int, axis: str, batch: Batch) -> str:
    each = " a sequence" if axis != "sequences" and batch.batch_size > 1 else ""
    return f"{counted(size, axis.removesuffix('s'))}{each}"
