"""Where a pass's attention time goes: the steps of a layer, with their times and physical limits.

A step is a decision point that arises in the batch's mode. It takes the time of the arm that is
chosen, with the layer's share of what the arm takes once a pass. What every choice pays alike
(projections of q, the write into the pool, o_proj, launches) is in no table and in no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nsa_tune.backend.baselines import Baseline
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.points.limits import NOTHING_TO_SELECT
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question, Setting
from nsa_tune.reports.analysis.ceilings import Ceilings
from nsa_tune.reports.analysis.work import work_of

Choose = Callable[["Policy", "Question"], str | None]
"""The choice that is taken for a question."""

_STEPS = {
    "indexer_metadata": "indexer schedule",
    "indexer_prefill": "indexer logits",
    "indexer_layout": "indexer logits",
    "indexer_topk": "top-k",
    "prefill": "attention",
    "decode": "attention",
    "dense_prefill": "attention",
    "dense_decode": "attention",
    "v4_prefill_c4": "attention, ratio 4",
    "v4_prefill_c128": "attention, ratio 128",
}
"""Point to step, in the order of a layer; other points follow under their own names."""
_ONCE_A_PASS = frozenset({"indexer_metadata"})
"""Points whose arms are timed for a whole pass."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a layer."""

    name: str
    point: str
    arm: str | None
    """What is taken; None where no arm is allowed or none has a time."""
    latency_us: float | None
    """In each layer, with its share of `pass_us`; None without a time, 0 where it is skipped."""
    low_us: float | None
    high_us: float | None
    """95 % interval of `latency_us`."""
    pass_us: float | None
    """What of it is taken once a pass; None where nothing is, or it was not measured apart."""
    least_us: float | None
    """Physical limit: the work of `arm` over the measured ceilings; None where one is unknown."""
    bound: str
    """What that limit is of, "memory" or "compute"; empty without one."""
    ways_us: Mapping[str, float]
    """Each allowed arm that has a time, fastest first."""
    default: str | None
    """What the engine's baseline takes."""
    default_us: float | None
    """Its time; None where it has none here."""
    note: str = ""
    """Why there is no time, or what is doubtful about it."""

    @property
    def next_best_us(self) -> float | None:
        """The second fastest way's time; None where there is no other way with a time."""
        return next(iter(sorted(self.ways_us.values())[1:]), None)


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """The steps of one batch."""

    batch: str
    """`str(Batch)`."""
    layers: int
    """Layers that take each step."""
    steps: tuple[Step, ...]
    total_us: float = field(init=False)
    """A layer of each kind, the steps with a time together."""
    next_best_us: float = field(init=False)
    """The same by the second fastest way of each step that has one."""
    default_us: float | None = field(init=False)
    """The same as `total_us` by the baseline's choices; None where one of them has no time."""

    def __post_init__(self) -> None:
        timed = [step for step in self.steps if step.latency_us is not None]
        defaults = [step.default_us for step in timed]
        known = [one for one in defaults if one is not None]
        values = {
            "total_us": sum(step.latency_us or 0.0 for step in timed),
            "next_best_us": sum(step.next_best_us or step.latency_us or 0.0 for step in timed),
            "default_us": sum(known) if len(known) == len(defaults) else None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def untimed(self) -> tuple[Step, ...]:
        """The steps without a time."""
        return tuple(step for step in self.steps if step.latency_us is None)


def layer_steps(
    batch: Batch, policies: Mapping[str, Policy], setting: Setting, baseline: Baseline,
    choose: Choose, ceilings: Ceilings | None,
) -> LayerSteps:  # fmt: skip
    """The steps of `batch`, in the order of a layer; none where no point has its mode.

    Args:
        policies: by the name of the point.
        choose: what is taken.
        ceilings: of the device; without them no step has a limit.
    """
    own = [policy for policy in policies.values() if batch.mode in policy.point.modes]
    order = {name: place for place, name in enumerate(_STEPS)}
    own.sort(key=lambda policy: order.get(policy.point.name, len(order)))
    steps = tuple(_step(batch, policy, baseline, choose, ceilings) for policy in own)
    return LayerSteps(str(batch), setting.sharing, steps)


def _step(
    batch: Batch, policy: Policy, baseline: Baseline, choose: Choose, ceilings: Ceilings | None
) -> Step:
    point, setting = policy.point, policy.setting
    layers = setting.sharing if point.name in _ONCE_A_PASS else 1
    survey = policy.survey(batch)
    every = policy.estimates(batch)
    timed = {arm: every[arm] for arm in survey.latencies if arm in every}
    by_time = sorted(timed, key=lambda arm: timed[arm].latency_us)
    ways = {arm: timed[arm].latency_us / layers for arm in by_time}
    arm = _fastest(timed, point.arms_taken(lambda question: choose(policy, question)))

    def by_default(question: Question) -> str:
        return baseline.choose(question, batch, setting)

    defaults = point.arms_taken(by_default)
    default = _fastest(timed, defaults)
    named = default or _named(policy, defaults, by_default)
    name = _STEPS.get(point.name, point.name)
    if not survey.latencies:
        skipped = NOTHING_TO_SELECT.check(batch, setting) in survey.forbidden.values()
        why = next(iter(survey.forbidden.values()), "no kernel for this device")
        us = 0.0 if skipped else None
        note = f"skipped: {why}" if skipped else f"every arm is forbidden: {why}"
        return Step(name, point.name, None, us, us, us, None, us, "", {}, named, us, note)
    if arm is None:
        note = _untimed(policy, choose, survey.latencies)
        return Step(name, point.name, None, None, None, None, None, None, "", ways,
                    named, ways.get(default or ""), note)  # fmt: skip
    one = timed[arm]
    least, bound = limit_of(point.name, arm, batch, setting, ceilings)
    once = one.latency_us if layers > 1 else _pass_us(policy, arm, batch)
    return Step(
        name, point.name, arm, one.latency_us / layers, one.low_us / layers, one.high_us / layers,
        once, None if least is None else least / layers, bound, ways,
        named, ways.get(default or ""),
        "outside of the measured range" if one.extrapolated else "",
    )  # fmt: skip


def _fastest(timed: Mapping[str, Estimate], among: set[str]) -> str | None:
    """The fastest arm of `among`; None where none of them has a time."""
    found = {arm: one.latency_us for arm, one in timed.items() if arm in among}
    return min(found, key=found.__getitem__, default=None)


def _named(policy: Policy, defaults: set[str], choose: Callable[[Question], str]) -> str | None:
    """What a baseline takes that has no time here: its one arm, else the first choice's name."""
    here = [one.name for one in policy.candidates if one.name in defaults]
    if len(here) == 1:
        return here[0]
    return next((choose(question) for question in policy.point.questions), None)


def _untimed(policy: Policy, choose: Choose, allowed: Iterable[str]) -> str:
    """Why what is taken has no time."""
    name = policy.point.name
    if not policy.rows:
        return f"the table has no times of {name}: measure them with `nsa-tune run --points {name}`"
    ways = list(allowed)
    if len(ways) == 1:
        return f"{ways[0]} is the only way here, and a run times no batch with one way"
    taken = [choice for one in policy.point.questions if (choice := choose(policy, one))]
    words = ", ".join(dict.fromkeys(taken)) or "nothing"
    return f"too little is measured of {words} in {name} near this batch"


def _pass_us(policy: Policy, arm: str, batch: Batch) -> float | None:
    """What the arm takes once a pass, by the measurements that its estimate is made of."""
    used = policy.rows_used(arm, batch)
    costs = [(row.pass_us, weight) for row, weight in used if row.pass_us is not None]
    weight = sum(part for _, part in costs)
    return sum(cost * part for cost, part in costs) / weight if weight else None


def limit_of(
    point: str, arm: str, batch: Batch, setting: Setting, ceilings: Ceilings | None
) -> tuple[float | None, str]:
    """The least microseconds of the arm's work on the device, and what bounds it."""
    work = work_of(point, arm, batch, setting)
    if work is None or ceilings is None:
        return None, ""
    limits = {"memory": work.moved / ceilings.bytes_per_s}
    peak = ceilings.flops_per_s.get(work.precision)
    if peak:
        limits["compute"] = work.flops / peak
    bound = max(limits, key=limits.__getitem__)
    return 1e6 * limits[bound], bound


# --- batches of a report


def typical_batches(policies: Mapping[str, Policy]) -> Iterator[Batch]:
    """Batches that a report shows: chunks of a long prompt, a short turn, and steps of decoding.

    As multiples of the profile's unit, and no larger than what was measured of some point of their
    mode.
    """
    measured = [(policy.point.modes, policy.measured) for policy in policies.values()]
    unit = next((policy.setting.profile.unit for policy in policies.values()), 0)
    for batch in _typical(unit) if unit else ():
        sizes = [
            (one.q_tokens, one.kv_tokens)
            for modes, batches in measured
            if batch.mode in modes
            for one in batches
            if one.mode is batch.mode
        ]
        most_q = max((q for q, _ in sizes), default=0)
        most_kv = max((kv for _, kv in sizes), default=0)
        if batch.q_tokens <= most_q and batch.kv_tokens <= most_kv:
            yield batch


def _typical(topk: int) -> Iterator[Batch]:
    chunk = 4 * topk
    for context in (4, 16, 32):
        yield Batch.extend([context * topk - chunk], [chunk])
    yield Batch.extend([16 * topk], [max(topk // 16, 1)])
    yield Batch.extend([topk // 2] * 4, [topk // 4] * 4)
    for count in (1, 64):
        yield Batch.decode([4 * topk] * count)
    yield Batch.verify([4 * topk] * 32, 2)
