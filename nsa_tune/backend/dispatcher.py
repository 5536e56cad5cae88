"""Dispatcher: opens the table for a key once and answers from it, batch after batch.

Without a usable table it answers by the engine's own rule and says so; only a request that cannot
be (an unknown model, heads that do not divide) is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import BatchError, NoTunedData, NsaTuneError, StoreError, UnknownName
from nsa_tune.backend import detect, tables
from nsa_tune.backend.batch import MAX_TOKENS, Batch, Mode
from nsa_tune.backend.explain import derived_reason, explained, reason_of
from nsa_tune.backend.matching import Here, differing, in_order, nothing_for
from nsa_tune.backend.plan import DERIVED, Plan, Reason, derive
from nsa_tune.backend.point import Answer, Setting
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.policy import Policy
from nsa_tune.backend.profiles import profile_of
from nsa_tune.backend.records import Device, Table
from nsa_tune.backend.rules import SGLANG_0_5_23, Rule
from nsa_tune.backend.verdict import Choice, decide, decide_for_all, pick

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_FIELDS = (
    "prefill_path", "mha_kernel", "sparse_prefill", "indexer_layout", "decode", "indexer_metadata",
)  # fmt: skip
_V4_FIELDS = ("v4_prefill_c4", "v4_prefill_c128")
_MOST_RECENT = 1024
_CONTEXTS = 17
"""Context lengths at which a captured size is weighed."""
_UNMEASURED = (1024, 131072)
"""Shortest and longest context where nothing was measured."""


class _Question(NamedTuple):
    answer: Answer
    default: Callable[[Batch, Setting], str]


class _Asked(NamedTuple):
    """A policy with the questions that it answers."""

    policy: Policy
    questions: tuple[_Question, ...]


class Dispatcher:
    """Answers for one GPU, model, head count and KV format. Safe to share between threads."""

    def __init__(
        self,
        setting: Setting,
        policies: Iterable[Policy],
        *,
        source: str,
        table: Table | None = None,
        rule: Rule = SGLANG_0_5_23,
    ) -> None:
        self.setting = setting
        self.source = source
        """Where the answers come from, and how that differs from this machine."""
        self.table = table
        """The measurements; None when the engine's rule answers."""
        self.rule = rule
        self.policies = {policy.point.name: policy for policy in policies}
        asked = [self._asked(policy) for policy in self.policies.values()]
        self._by_mode = {
            mode: tuple(one for one in asked if mode in one.policy.point.modes) for mode in Mode
        }
        self._because = _Because(self, None)
        self._recent: dict[Batch, Plan] = {}
        self._captured: dict[tuple[Mode, int, int], Plan] = {}

    def _asked(self, policy: Policy) -> _Asked:
        return _Asked(
            policy,
            tuple(_Question(answer, self.rule.chooser(answer)) for answer in policy.point.answers),
        )

    @classmethod
    def open(
        cls,
        db: str | Path | None = None,
        gpu: str | None = None,
        *,
        model: str,
        heads: int,
        kv_dtype: str,
        strict: bool = False,
    ) -> Dispatcher:
        """The dispatcher for `gpu` as the driver names it (None: this machine's) and local `heads`.

        `db` is a database or text table that is searched before the standard places. Without a
        usable table the engine's rule answers, unless `strict`.

        Raises:
            UsageError: for an unknown model or KV dtype, or heads that do not divide the model's.
            NoTunedData: when `strict` and there is no usable table; it names what differs.
        """
        profile = profile_of(model)
        layout = profile.layout(kv_dtype)
        profile.check_heads(heads)
        gpu = detect.local_device_name() if gpu is None else gpu
        here = Here.of(gpu)
        wanted = tables.Wanted(gpu, model, heads, str(layout))
        found, problem = _found(None if db is None else Path(db), wanted)
        for table in in_order(found, here):
            libraries = dict(table.key.libraries if here is None else here.libraries)
            setting = Setting(
                profile, heads, layout, table.device, libraries, limits=dict(table.limits)
            )
            try:
                return cls(
                    setting, _compiled(setting, table), source=_source(table, here), table=table
                )
            except NsaTuneError as error:
                problem = f"{table.source} cannot be used: {error}"
        if strict:
            raise NoTunedData(problem)
        _log.warning("%s answers, without measurements: %s", SGLANG_0_5_23.name, problem)
        device = detect.KNOWN.get(gpu) or Device(gpu, "cpu" if gpu == detect.cpu_name() else "")
        libraries = {} if here is None else dict(here.libraries)
        setting = Setting(profile, heads, layout, device, libraries)
        source = f"the rule of {SGLANG_0_5_23.name}: {problem}"
        return cls(setting, _compiled(setting, None), source=source)

    def plan(self, batch: Batch) -> Plan:
        """Every decision for `batch`. Does not raise because of a table.

        Recent plans are kept for batches without lens: an engine asks again in every layer.
        """
        if batch.lens is not None:
            return self._fresh_plan(batch)
        plan = self._recent.get(batch)
        if plan is None:
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            plan = self._recent[batch] = self._fresh_plan(batch)
        return plan

    def _fresh_plan(self, batch: Batch) -> Plan:
        setting = self.setting
        chosen: dict[str, str | None] = {}
        for policy, questions in self._by_mode[batch.mode]:
            survey = policy.survey(batch)
            for answer, default in questions:
                chosen[answer.name] = pick(answer, survey, default(batch, setting))[0]
        return self._plan(batch, chosen, self._because)

    def captured(self, batch_size: int, next_n: int = 1, mode: str | None = None) -> Plan:
        """The one plan that a CUDA graph of `batch_size` sequences may hold, at any context.

        Of the choices that are allowed at every context it has the least mean regret over the
        measured ones. `mode` defaults to decode for next_n 1 and to target_verify above.

        Raises:
            BatchError: for sizes below 1 or a mode that is not captured by size.
        """
        word = mode or str(Mode.DECODE if next_n == 1 else Mode.TARGET_VERIFY)
        if word == Mode.EXTEND or word not in list(Mode):
            raise BatchError(f"a graph is captured by size for decoding, not for {word!r}")
        key = (Mode(word), batch_size, next_n)
        if key not in self._captured:
            self._captured[key] = self._plan_captured(*key)
        return self._captured[key]

    def questions(self, mode: Mode) -> tuple[str, ...]:
        """The tuned fields of a plan for `mode`."""
        return tuple(
            question.answer.name for asked in self._by_mode[mode] for question in asked.questions
        )

    def decide(self, batch: Batch, name: str) -> Choice:
        """The choice behind the tuned field `name` of `plan(batch)`, with all that led to it.

        Raises:
            UnknownName: when the batch's mode has no such question.
        """
        for policy, questions in self._by_mode[batch.mode]:
            for answer, default in questions:
                if answer.name == name:
                    return decide(answer, policy, batch, self.setting, default(batch, self.setting))
        raise UnknownName.of(f"question in {batch.mode}", name, list(self.questions(batch.mode)))

    def explain(self, batch: Batch) -> str:
        """The plan for `batch` in words: each decision with its estimates and reasons."""
        return explained(self.plan(batch), self.source)

    def _plan(self, batch: Batch, chosen: Mapping[str, str | None], because: _Because) -> Plan:
        path, mha_kernel, sparse, indexer, decode, metadata = map(chosen.get, _FIELDS)
        setting = self.setting
        derived = derive(batch, setting.layout, setting.profile.index_topk, path, sparse)
        v4 = [chosen.get(name) for name in _V4_FIELDS]
        return Plan(
            batch, path, mha_kernel, sparse, indexer, decode, metadata, *derived, because, *v4
        )

    def _plan_captured(self, mode: Mode, batch_size: int, next_n: int) -> Plan:
        choices: dict[str, Choice] = {}
        batches = self._captured_batches(mode, batch_size, next_n)
        for policy, questions in self._by_mode[mode]:
            for answer, default in questions:
                choices[answer.name] = decide_for_all(
                    answer, policy, batches, self.setting, default
                )
        chosen = {name: choice.choice for name, choice in choices.items()}
        return self._plan(batches[-1], chosen, _Because(self, choices))

    def _captured_batches(self, mode: Mode, batch_size: int, next_n: int) -> list[Batch]:
        """Batches of equal contexts, spread evenly in octaves over the measured range."""
        measured = [batch for asked in self._by_mode[mode] for batch in asked.policy.measured]
        contexts = [round(batch.kv_tokens / batch.sequences) for batch in measured]
        # A big batch was never measured at the longest contexts: its keys fill no pool.
        most = max([batch.kv_tokens for batch in measured], default=MAX_TOKENS) // max(
            batch_size, 1
        )
        shortest, longest = (min(contexts), max(contexts)) if contexts else _UNMEASURED
        low, high = (max(min(length, most), next_n) for length in (shortest, longest))
        steps = [i / (_CONTEXTS - 1) for i in range(_CONTEXTS)]
        spaced = {round(exp(log(low) + step * (log(high) - log(low)))) for step in steps}
        return [
            Batch.from_totals(
                mode=mode,
                sequences=batch_size,
                q_tokens=batch_size * next_n,
                kv_tokens=batch_size * context,
                max_kv=context,
                next_n=next_n,
                captured=True,
            )
            for context in sorted(spaced)
        ]


class _Because:
    """Says why a plan's fields have their values: by deciding again, or from `choices`."""

    def __init__(self, dispatcher: Dispatcher, choices: Mapping[str, Choice] | None) -> None:
        self._dispatcher = dispatcher
        self._choices = choices

    def names(self, plan: Plan) -> tuple[str, ...]:
        """The fields of `plan` that have a reason."""
        extend = plan.batch.mode is Mode.EXTEND
        tuned = self._dispatcher.questions(plan.batch.mode)
        if self._dispatcher.setting.profile.family == "v4":
            return tuned
        return (*tuned, *(name for name in DERIVED if extend or name != "dequantize_prefix"))

    def reason(self, plan: Plan, name: str) -> Reason:
        """Why the field `name` of `plan` has its value."""
        by = self._dispatcher
        if name in DERIVED:
            return derived_reason(plan, name, by.rule)
        choice = by.decide(plan.batch, name) if self._choices is None else self._choices[name]
        return reason_of(choice, by.rule, by.source)


def _compiled(setting: Setting, table: Table | None) -> list[Policy]:
    rows = () if table is None else table.measurements
    arising = points_for(setting.profile, (), POINTS)
    return [Policy.compile(point, setting, rows) for point in arising]


def _found(db: Path | None, wanted: tables.Wanted) -> tuple[list[Table], str]:
    """The tables for `wanted`, newest first, or none and why."""
    try:
        found = tables.find(db, **wanted._asdict())
    except StoreError as error:
        return [], str(error)
    return found, "" if found else nothing_for(db, wanted)


def _source(table: Table, here: Here | None) -> str:
    text = f"{table.source}, measured {table.measured_at}" if table.measured_at else table.source
    differences = differing(table, here)
    return f"{text}; {'; '.join(differences)}" if differences else text
