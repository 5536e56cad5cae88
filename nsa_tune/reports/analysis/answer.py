"""The answer of a report: what to set in the engine, and how much attention time that saves.

Everything is computed from measured times of one layer's attention, on the table's batches. A
choice takes its fastest measured arm. A flag is one value for all batches. By batch, the table
decides: a decode for each captured size, as a graph holds one choice for all of its contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple

from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.decide import decide_for_all
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import NOT_SGLANGS
from nsa_tune.backend.types.point import Question
from nsa_tune.backend.types.records import Measurement
from nsa_tune.reports.analysis.cached_policy import CachedPolicy

_BACKENDS = ("flashmla_sparse", "flashmla_kv", "fa3", "tilelang", "trtllm")
"""Values of both flags in SGLang 0.5.23 (arg_groups/fields/exec_.py:299, 341)."""


class _Flag(NamedTuple):
    """An option of the engine, and the question that it answers for all batches alike."""

    name: str
    question: str
    values: tuple[str, ...]


_FLAGS = {
    "prefill": _Flag("--dsa-prefill-backend", "sparse_prefill", _BACKENDS),
    "decode": _Flag("--dsa-decode-backend", "decode", _BACKENDS),
}
"""By the name of the point; V4's have neither."""
_STEPS = {
    "prefill": "prefill",
    "decode": "decode",
    "dense_prefill": "prefill",
    "dense_decode": "decode",
    "v4_prefill_c4": "prefill layers of compression ratio 4",
    "v4_prefill_c128": "prefill layers of compression ratio 128",
}
"""Points that are answered, and what they are called."""


@dataclass(frozen=True, slots=True)
class Saving:
    """How much less attention takes than by the engine's defaults, as shares: 0.2 is 20 % less."""

    mean: float
    """Geometric mean over the batches: each counts the same."""
    total: float
    """Of the sum of the batches' times: long batches count most."""

    @property
    def pays(self) -> bool:
        """Whether both are beyond the margin within which times count as equal."""
        return min(self.mean, self.total) > MARGIN


@dataclass(frozen=True, slots=True)
class Answer:
    """What to set for one step of a pass."""

    step: str
    """``prefill`` or ``decode``."""
    engine: str
    batches: int
    by_batch: Saving
    """By choosing for each batch."""
    flag: str
    """The engine's option for this step; empty without one."""
    default: str
    """The value that the engine takes by itself; empty without a flag."""
    value: str
    """The best value; the default where no other value saves time."""
    by_flag: Saving
    """By `value` for all batches."""

    @property
    def gain(self) -> float:
        """The share of the headline: what the advised choice saves."""
        if self._worth_choosing:
            return self.by_batch.mean
        return self.by_flag.mean if self.by_flag.pays else 0.0

    @property
    def _worth_choosing(self) -> bool:
        """Whether it saves more than the flag, by the mean and of the total."""
        more = (self.by_batch.mean - self.by_flag.mean, self.by_batch.total - self.by_flag.total)
        return min(more) > MARGIN

    @property
    def _unit(self) -> str:
        """What one choice is made for."""
        return "captured size" if self.step == "decode" else "batch"

    @property
    def sentence(self) -> str:
        """What to do and what it gives. Flags are between backticks."""
        less = f"less attention time in {self.step}"
        if self._worth_choosing:
            saved = f"{percent(self.by_batch.mean)} {less} than by {self.engine}'s defaults"
            if not self.flag:
                unasked = "No plug-in asks this table by default"
                return f"Choosing for each {self._unit} takes {saved}. {unasked}."
            if self.step == "decode":
                few = "The plug-in does so only for a few sequences over a bf16 pool"
                return f"Choosing for each {self._unit} takes {saved}. {few}. {self._beside}"
            return f"Install the plug-in, which chooses for each batch: {saved}. {self._beside}"
        if self.by_flag.pays:
            started = f"Start {self.engine} with `{self.flag} {self.value}`"
            return (
                f"{started}: {self._by_flag} {less}. Choosing for each {self._unit} adds nothing."
            )
        by_mean, by_total = percent(self.by_batch.mean), percent(self.by_batch.total)
        saved = f"{by_mean} by the mean"
        if self.by_batch.total < self.by_batch.mean:
            saved = f"{by_total} of the batches' total time"
        leave = f"Leave {self.engine} as it is in {self.step}"
        return f"{leave}: choosing for each {self._unit} saves {saved}."

    @property
    def _beside(self) -> str:
        """What the flag gives without the plug-in."""
        if self.by_flag.pays:
            return f"The best single flag, `{self.flag} {self.value}`, gives {self._by_flag}."
        return f"No single value of `{self.flag}` gives 1 %."

    @property
    def _by_flag(self) -> str:
        return percent(self.by_flag.mean)

    @property
    def basis(self) -> str:
        """What the sentence is based on."""
        mean = f"Mean over {self.batches} measured batches, each counting the same"
        totals = f"{percent(self.by_batch.total)} by choosing for each {self._unit}"
        if self.flag and self.value != self.default:
            totals += f", {percent(self.by_flag.total)} by the flag"
        return f"{mean}; of their total time {totals}."


def percent(share: float) -> str:
    """A share in whole per cent: ``21 %``; small ones with a digit more."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.2g} %"


def less_than_one(share: float) -> str:
    """A gain for a headline: what is within the margin is no gain."""
    return percent(share) if share > MARGIN else "under 1 %"


def answer_of(
    policy: CachedPolicy, measured: Mapping[str, Mapping[str, Measurement]]
) -> Answer | None:
    """The answer of a point; None where it has none, or too little is measured to compare.

    `measured` has the successful measurements by the batch's text and the arm.
    """
    step = _STEPS.get(policy.point.name)
    return None if step is None else _answer(policy, measured, step)


class _Times(NamedTuple):
    """The measured times of one batch, in microseconds."""

    default_us: float
    chosen_us: float
    by_value_us: Mapping[str, float]
    """By the flag's value; without those that have no time here."""


def _answer(
    policy: CachedPolicy, measured: Mapping[str, Mapping[str, Measurement]], step: str
) -> Answer | None:
    flag = _FLAGS.get(policy.point.name)
    times = [
        entry
        for batches in decided_together(policy.measured)
        for choices in [{q.name: _chosen(policy, q, batches) for q in policy.point.questions}]
        for batch in batches
        if (entry := _times(policy, batch, measured[str(batch)], flag, choices)) is not None
    ]
    if not times:
        return None
    defaults = [entry.default_us for entry in times]
    default, value, by_flag = "", "", Saving(0.0, 0.0)
    if flag is not None:
        question = next(one for one in policy.point.questions if one.name == flag.question)
        default = value = policy.baseline.choose(question, policy.measured[0], policy.setting)
        for name, saving in _by_value(times, defaults):
            if saving.pays and saving.mean > by_flag.mean:
                value, by_flag = name, saving
    return Answer(
        step=step,
        engine=policy.baseline.name.partition(" ")[0],
        batches=len(times),
        by_batch=_saving([entry.chosen_us for entry in times], defaults),
        flag="" if flag is None else flag.name,
        default=default,
        value=value,
        by_flag=by_flag,
    )


def _by_value(times: Sequence[_Times], defaults: Sequence[float]) -> Iterator[tuple[str, Saving]]:
    """(value, saving) of each value of the flag that has a time on every batch."""
    for name in times[0].by_value_us:
        by_value = [entry.by_value_us.get(name) for entry in times]
        complete = [us for us in by_value if us is not None]
        if len(complete) == len(times):
            yield name, _saving(complete, defaults)


def decided_together(batches: Iterable[Batch]) -> Iterable[list[Batch]]:
    """Each prefill by itself, and decodes of one captured size."""
    groups: dict[object, list[Batch]] = {}
    for batch in batches:
        size = batch.mode, batch.batch_size, batch.next_n
        groups.setdefault(batch if batch.mode is Mode.EXTEND else size, []).append(batch)
    return groups.values()


def _times(
    policy: CachedPolicy,
    batch: Batch,
    rows: Mapping[str, Measurement],
    flag: _Flag | None,
    choices: Mapping[str, str | None],
) -> _Times | None:
    """The times of one batch; None where fewer than two arms or the default have one.

    `choices` are the plug-in's, by question.
    """
    allowed = policy.survey(batch).latencies
    latencies = {
        arm: row.latency_us
        for arm, row in rows.items()
        if arm in allowed and row.latency_us is not None
    }

    def by_default(question: Question) -> str:
        return policy.baseline.choose(question, batch, policy.setting)

    def fastest(choose: Callable[[Question], str | None]) -> float | None:
        arms = policy.point.arms_taken(choose) - NOT_SGLANGS
        return min((latencies[arm] for arm in arms if arm in latencies), default=None)

    def by_value(value: str, question: Question) -> str:
        assert flag is not None
        return value if question.name == flag.question else by_default(question)

    default_us = fastest(by_default)
    chosen_us = fastest(lambda question: choices[question.name])
    if len(latencies) < 2 or default_us is None or chosen_us is None:
        return None
    values = {value: fastest(partial(by_value, value)) for value in (flag.values if flag else ())}
    return _Times(default_us, chosen_us, {v: us for v, us in values.items() if us is not None})


def _chosen(policy: CachedPolicy, question: Question, batches: Sequence[Batch]) -> str | None:
    """What the plug-in takes for all `batches`: the table's choice among the arms that it calls."""
    choices = {
        choice: called
        for choice, arms in question.choices.items()
        if (called := tuple(arm for arm in arms if arm not in NOT_SGLANGS))
    }
    called_here, default = Question(question.name, choices), policy.baseline.choose
    return decide_for_all(
        called_here, policy, batches, lambda batch: default(question, batch, policy.setting)
    ).choice


def _saving(times: Sequence[float], defaults: Sequence[float]) -> Saving:
    ratios = [us / default for us, default in zip(times, defaults, strict=True)]
    return Saving(1 - geometric_mean(ratios), 1 - sum(times) / sum(defaults))
