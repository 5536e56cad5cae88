"""How fast a long prompt is prefilled in chunks of one size or another.

A prompt of one sequence is cut into chunks; each is an extend over what came before. The time of a
chunk is the surface's estimate for the fastest way that no guard forbids. It is that of attention
in one layer: what else an engine does for each chunk is not in the table, so these curves say what
a chunk size costs in attention and not which is best over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_tune.backend.types.batch import Batch, Mode

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Rule
    from nsa_tune.backend.costmodel.policy import Policy

__all__ = ["ChunkCurve", "ChunkPoint", "chunk_curves"]

_CHUNKS = (1 / 2, 1, 2, 4, 8)
_PROMPTS = (2, 8, 32, 64)
"""Both in index_topk."""


@dataclass(frozen=True, slots=True)
class ChunkPoint:
    """One prompt in chunks of one size."""

    chunk: int
    total_us: float
    """Of attention in one layer, over all chunks."""
    default_us: float | None
    """The same by the engine's rule; None where it takes what was not measured."""
    arms: tuple[str, ...]
    """The arms that were fastest on some chunk, in the order of their first one."""
    limits: Mapping[str, str]
    """Arm to the guard's clause that forbids it on every chunk."""
    extrapolated: bool
    """Whether some chunk lies outside of what was measured."""


@dataclass(frozen=True, slots=True)
class ChunkCurve:
    """One prompt length over the chunk sizes."""

    prompt: int
    points: tuple[ChunkPoint, ...]

    @property
    def best(self) -> ChunkPoint:
        """The size at which attention takes least."""
        return min(self.points, key=lambda point: point.total_us)

    def rate(self, total_us: float) -> float:
        """Prompt tokens a second and layer, when the prompt takes `total_us`."""
        return self.prompt / total_us * 1e6


@dataclass(frozen=True, slots=True)
class _Pass:
    """One chunk of a prompt."""

    arm: str
    latency_us: float
    default_us: float | None
    refused: Mapping[str, str]
    extrapolated: bool


def chunk_curves(policy: Policy, rule: Rule) -> tuple[ChunkCurve, ...]:
    """Curves for prompts of one sequence, within the measured new tokens and kv tokens.

    None for a point that is not of prefill alone, or of which too little was measured.
    """
    if policy.point.modes != {Mode.EXTEND}:
        return ()
    extends = [b for b in policy.measured if b.mode is Mode.EXTEND and b.sequences == 1]
    if not extends:
        return ()
    setting = policy.setting
    topk = setting.profile.index_topk
    most_new = max(batch.q_tokens for batch in extends)
    most_kv = max(batch.kv_tokens for batch in extends)
    chunks = [size for scale in _CHUNKS if (size := round(scale * topk)) <= most_new]
    passes: dict[tuple[int, int], _Pass | None] = {}
    curves = []
    for scale in _PROMPTS:
        prompt = round(scale * topk)
        if prompt <= most_kv:
            found = tuple(_points(policy, rule, prompt, chunks, passes))
            if len(found) > 1:
                curves.append(ChunkCurve(prompt, found))
    return tuple(curves)


def _points(
    policy: Policy,
    rule: Rule,
    prompt: int,
    chunks: Sequence[int],
    passes: dict[tuple[int, int], _Pass | None],
) -> Iterator[ChunkPoint]:
    for chunk in chunks:
        if chunk > prompt:
            return
        steps = []
        for prefix in range(0, prompt, chunk):
            new = min(chunk, prompt - prefix)
            if (prefix, new) not in passes:
                passes[prefix, new] = _pass(policy, rule, Batch.extend([prefix], [new]))
            steps.append(passes[prefix, new])
        known = [step for step in steps if step is not None]
        if len(known) == len(steps):
            yield _point(chunk, known)


def _point(chunk: int, steps: Sequence[_Pass]) -> ChunkPoint:
    defaults = [step.default_us for step in steps if step.default_us is not None]
    always = set.intersection(*(set(step.refused) for step in steps))
    return ChunkPoint(
        chunk=chunk,
        total_us=sum(step.latency_us for step in steps),
        default_us=sum(defaults) if len(defaults) == len(steps) else None,
        arms=tuple(dict.fromkeys(step.arm for step in steps)),
        limits={arm: why for arm, why in steps[-1].refused.items() if arm in always},
        extrapolated=any(step.extrapolated for step in steps),
    )


def _pass(policy: Policy, rule: Rule, batch: Batch) -> _Pass | None:
    """None where no allowed arm has an estimate."""
    survey = policy.survey(batch)
    every = policy.estimates(batch)
    timed = {arm: every[arm] for arm in survey.latencies if arm in every}
    if not timed:
        return None
    arm = min(timed, key=lambda name: timed[name].latency_us)
    default = _default_arms(policy, rule, batch)
    return _Pass(
        arm,
        timed[arm].latency_us,
        min((one.latency_us for name, one in timed.items() if name in default), default=None),
        survey.refused,
        timed[arm].extrapolated,
    )


def _default_arms(policy: Policy, rule: Rule, batch: Batch) -> set[str]:
    """The arms that the engine's rule leaves: none that another choice of a question stands for.

    A question about a path that is not taken takes no more away.
    """
    left = {arm.name for arm in policy.point.arms}
    for answer in policy.point.answers:
        taken = set(answer.choices.get(rule.choose(answer, batch, policy.setting), ()))
        left -= {arm for arms in answer.choices.values() for arm in arms} - taken
    return left
