"""Chunk sizes: how long attention takes for a long prompt that is prefilled in chunks.

A prompt of one sequence is cut into chunks of one size. Each chunk is an extend whose prefix is
everything before it, and takes the estimated time of its fastest allowed arm, and that of the
indexer's steps as far as they were measured. Times are of attention in one layer. The engine does
more than that for each chunk, which no table holds, so the best size here need not be the best size
for the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.reports.analysis.layer_steps import arms_taken

if TYPE_CHECKING:
    from nsa_tune.backend.baselines import Baseline
    from nsa_tune.backend.costmodel.policy import Policy

_CHUNKS = (1 / 2, 1, 2, 4, 8)
_PROMPTS = (2, 8, 32, 64)
"""Chunk sizes and prompt lengths as multiples of index_topk."""


@dataclass(frozen=True, slots=True)
class ChunkPoint:
    """One prompt length, cut into chunks of one size."""

    chunk: int
    total_us: float
    """Attention in one layer, summed over all chunks."""
    default_us: float | None
    """The same with the baseline's choices; None where one of them was not measured."""
    arms: tuple[str, ...]
    """The arms that are fastest on at least one chunk, in order of first use."""
    limits: Mapping[str, str]
    """Arm to the guard that forbids it on every chunk."""
    extrapolated: bool
    """Whether any chunk lies outside the measured batches."""


@dataclass(frozen=True, slots=True)
class ChunkCurve:
    """One prompt length over several chunk sizes."""

    prompt: int
    points: tuple[ChunkPoint, ...]
    steps: tuple[str, ...] = ()
    """Points whose times are in it besides the own."""

    @property
    def best(self) -> ChunkPoint:
        """The chunk size with the shortest time."""
        return min(self.points, key=lambda point: point.total_us)

    def rate(self, total_us: float) -> float:
        """Prompt tokens per second through one layer, if the prompt takes `total_us`."""
        return self.prompt / total_us * 1e6


@dataclass(frozen=True, slots=True)
class _Pass:
    """One chunk of a prompt."""

    arm: str
    latency_us: float
    default_us: float | None
    refused: Mapping[str, str]
    extrapolated: bool


def chunk_curves(
    policy: Policy, baseline: Baseline, others: Sequence[Policy] = ()
) -> tuple[ChunkCurve, ...]:
    """Curves for prompts of one sequence, no larger than the measured batches.

    `others` answer what else each layer of a chunk does; their times are added.

    Empty for a point that answers other modes than prefill, or with too few measurements.
    """
    if policy.point.modes != {Mode.EXTEND}:
        return ()
    extends = [b for b in policy.measured if b.mode is Mode.EXTEND and b.batch_size == 1]
    if not extends:
        return ()
    setting = policy.setting
    topk = setting.profile.index_topk
    most_new = max(batch.q_tokens for batch in extends)
    most_kv = max(batch.kv_tokens for batch in extends)
    chunks = [size for scale in _CHUNKS if (size := round(scale * topk)) <= most_new]
    passes: dict[tuple[int, int], _Pass | None] = {}
    steps = [one for one in others if one.measured]
    names = tuple(one.point.name for one in steps)
    curves = []
    for scale in _PROMPTS:
        prompt = round(scale * topk)
        if prompt <= most_kv:
            found = tuple(_points([policy, *steps], baseline, prompt, chunks, passes))
            if len(found) > 1:
                curves.append(ChunkCurve(prompt, found, names))
    return tuple(curves)


def _points(
    policies: Sequence[Policy],
    baseline: Baseline,
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
                passes[prefix, new] = _pass(policies, baseline, Batch.extend([prefix], [new]))
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


def _pass(policies: Sequence[Policy], baseline: Baseline, batch: Batch) -> _Pass | None:
    """One chunk by all policies; None where the first has no allowed arm with an estimate."""
    found = _step(policies[0], baseline, batch)
    if found is None:
        return None
    for policy in policies[1:]:
        step = _step(policy, baseline, batch)
        if step is not None:  # a short chunk has nothing to score
            found = _together(found, step)
    return found


def _together(one: _Pass, other: _Pass) -> _Pass:
    known = one.default_us is not None and other.default_us is not None
    return _Pass(
        one.arm,
        one.latency_us + other.latency_us,
        (one.default_us or 0.0) + (other.default_us or 0.0) if known else None,
        one.refused,
        one.extrapolated or other.extrapolated,
    )


def _step(policy: Policy, baseline: Baseline, batch: Batch) -> _Pass | None:
    survey = policy.survey(batch)
    every = policy.estimates(batch)
    timed = {arm: every[arm] for arm in survey.latencies if arm in every}
    if not timed:
        return None
    arm = min(timed, key=lambda name: timed[name].latency_us)
    default = arms_taken(
        policy.point, lambda question: baseline.choose(question, batch, policy.setting)
    )
    return _Pass(
        arm,
        timed[arm].latency_us,
        min((one.latency_us for name, one in timed.items() if name in default), default=None),
        survey.refused,
        timed[arm].extrapolated,
    )
