"""Attention of one pass by a table's estimates: all layers, under each setup of the engine.

A setup is the engine by itself, the engine with one value of one flag, or with the plug-in. A step
of a pass is a decision point. A step for which the table has no times is in no setup's figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.baselines import Baseline
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Point
from nsa_tune.engines.sglang.costs import longer_us, mha_projection_us

DEFAULT, PLUGIN = "default", "plug-in"
"""Setups: the engine as it is launched, and the same with the plug-in."""
PREFILL_FLAG, DECODE_FLAG = "--dsa-prefill-backend", "--dsa-decode-backend"
FORCE_MQA = "--attention-config.sparse_mla_force_mqa"
_INDEXED_LAYERS = ("indexer_prefill", "indexer_layout", "indexer_topk")
"""Points whose work only layers with an indexer do."""
_ONCE_A_PASS = "indexer_metadata"
_COPIED = "mla/flashmla_sparse"
_FLAGS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "sglang": {
        PREFILL_FLAG: ("sparse_prefill", ("flashmla_sparse", "flashmla_kv", "fa3")),
        DECODE_FLAG: ("decode", ("flashmla_kv", "flashmla_sparse", "fa3")),
    },
    "vllm": {FORCE_MQA: ("prefill_path", ("mla",))},
}
"""By engine and flag: the question that the flag answers, and its values."""

Answers = Mapping[str, str]  # question to choice


@dataclass(frozen=True, slots=True)
class Attention:
    """One pass."""

    us: Mapping[str, float]
    """By setup: all layers' attention, infinite where a flag names a kernel that cannot run."""
    dense_us: float | None  # all layers by MHA, where that is exact and measured


class AttentionPrices:
    """Prices attention by one table."""

    def __init__(
        self, dispatcher: Dispatcher, engine: str, baseline: Baseline, *, own_copies: bool = False,
        indexer_share: float = 1.0, steered: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Prices of passes in `engine` ("sglang" or "vllm"), which decides by `baseline`.

        The plug-in switches between the prefill kernels `steered`; with `own_copies` it copies
        around `flashmla_sparse`, faster than SGLang. `indexer_share` is the part of the layers that
        select keys; the others reuse a selection. NoTunedData without a table.
        """
        if dispatcher.table is None:
            device = dispatcher.setting.device.name
            raise NoTunedData(f"no answer for {device}: see `nsa-tune gpus`")
        self.dispatcher, self.engine, self.setting = dispatcher, engine, dispatcher.setting
        self._baseline, self._own_copies, self._steered = baseline, own_copies, steered
        asked = ("sparse_prefill", "prefill_path") if engine == "vllm" else ("sparse_prefill",)
        self._choose = dispatcher.choosers(asked)
        self.indexer_share = indexer_share
        policies = dispatcher.policies
        measured = [policy for policy in policies.values() if policy.measured]
        self._policies = {
            extend: [policy for policy in measured if mode in policy.point.modes]
            for extend, mode in ((True, Mode.EXTEND), (False, Mode.DECODE))
        }
        self.unpriced = {name: None for name, policy in policies.items() if not policy.measured}
        """Steps of passes priced so far for which what the engine runs has no times, in order."""
        self.flags = {
            f"{flag} {'true' if value == 'mla' else value}": (question, value)
            for flag, (question, values) in _FLAGS[engine].items()
            for value in values
            if _is_measured(dispatcher, question, value)
        }
        """Setups of one flag: which question it answers, and how."""
        self.setups = (DEFAULT, *self.flags, PLUGIN)
        self._remaining: dict[tuple[str | None, ...], set[str]] = {}

    def check(self, given: Answers) -> None:
        """Refuse flags in use whose kernel has no times: UsageError for the first of them."""
        for question, value in given.items():
            if not _is_measured(self.dispatcher, question, value):
                raise UsageError(f"{value} ({question}) is not priced: the table has no times")

    def of(
        self, batch: Batch, *, graph: bool, given: Answers = MappingProxyType({}),
        setups: Sequence[str] = (),
    ) -> Attention:  # fmt: skip
        """The attention of `batch` under `setups`, else all; in a CUDA graph SGLang takes no MHA.
        What the flags in use answer (`given`) holds in every setup that does not differ."""
        extend = batch.mode is Mode.EXTEND
        captured = replace(batch, captured=True) if graph else batch
        us = dict.fromkeys(setups or self.setups, 0.0)
        changes = {setup: dict([answer]) for setup, answer in self.flags.items() if setup in us}
        if extend and PLUGIN in us:
            changes[PLUGIN] = self._steered_to(captured)
        for policy in self._policies[extend]:
            name = policy.point.name
            if name == _ONCE_A_PASS and extend:
                continue  # engines score a prefill's keys in one piece
            # Only attention itself runs otherwise in a graph; the indexer runs between its parts.
            step = captured if name == "prefill" or not extend else batch
            answers = self._answers(policy.point, step, given)
            arms = {
                one: self._arms(policy.point, {**answers, **changes.get(one, {})}) for one in us
            }
            timed = self._timed(policy, step, set().union(*arms.values()))
            if timed is None:
                continue
            usual = _fastest(arms[DEFAULT], timed)
            if usual is None:
                self.unpriced[name] = None
                continue
            for setup in us:
                arm = _fastest(arms[setup], timed)
                if arm is None and setup == PLUGIN:
                    arm = usual
                us[setup] += inf if arm is None else self._with_copies(setup, arm, step, timed[arm])
        return Attention(us, self._dense_us(batch) if PLUGIN in changes else None)

    def _timed(self, policy: Policy, batch: Batch, arms: set[str]) -> dict[str, float] | None:
        """By allowed arm: microseconds of all layers; None where a pass lacks the step."""
        times = policy.times_us(batch, arms)
        if times is None:
            return None
        name = policy.point.name
        layers = 1.0 if name == _ONCE_A_PASS else float(self.setting.sharing)
        if name in _INDEXED_LAYERS:
            layers *= self.indexer_share
        around = mha_projection_us(batch, self.setting.layout) if self.engine == "sglang" else 0.0
        return {arm: layers * (us + around * arm.startswith("mha/")) for arm, us in times.items()}

    def _answers(self, point: Point, batch: Batch, given: Answers) -> dict[str, str]:
        """What the engine answers, with the flags in use."""
        answers = {
            question.name: given.get(question.name)
            or self._baseline.choose(question, batch, self.setting)
            for question in point.questions
        }
        if batch.next_n == 1 and answers.get("indexer_layout") == "flatten":
            answers["indexer_layout"] = "native"  # one and the same there
        return answers

    def _steered_to(self, batch: Batch) -> dict[str, str]:
        """What the plug-in answers for a prefill."""
        kernel, *path = self._choose(batch)
        answers = {"sparse_prefill": kernel} if kernel in self._steered else {}
        return answers | {"prefill_path": path[0]} if path and path[0] else answers

    def _arms(self, point: Point, answers: Answers) -> set[str]:
        """The arms that remain when every question is answered so."""
        key = point.name, *[answers.get(question.name) for question in point.questions]
        remaining = self._remaining.get(key)
        if remaining is None:
            remaining = point.arms_taken(lambda question: answers.get(question.name))
            self._remaining[key] = remaining
        return remaining

    def _with_copies(self, setup: str, arm: str, batch: Batch, us: float) -> float:
        """`us`, and what SGLang's own copies around a kernel take longer than the plug-in's."""
        sglang = self.engine == "sglang" and self.setting.device.arch == "sm90"
        if arm != _COPIED or not sglang or (setup == PLUGIN and self._own_copies):
            return us
        return us + self.setting.sharing * longer_us(batch, self.setting.layout, self.setting.heads)

    def _dense_us(self, batch: Batch) -> float | None:
        policy = self.dispatcher.policies.get("prefill")
        if policy is None or batch.max_kv > self.setting.profile.index_topk:
            return None
        arms = {arm.name for arm in policy.candidates if arm.name.startswith("mha/")}
        timed = self._timed(policy, replace(batch, captured=False), arms) or {}
        return min(timed.values(), default=None)


def _fastest(arms: set[str], timed: Mapping[str, float]) -> str | None:
    return min((arm for arm in timed if arm in arms), key=timed.__getitem__, default=None)


def _is_measured(dispatcher: Dispatcher, question: str, value: str) -> bool:
    """Whether this device and layout have an arm for the value, and the table has times of it."""
    return any(
        arm.name in asked.choices.get(value, ())
        for name, policy in dispatcher.policies.items()
        for asked in policy.point.questions
        for arm in policy.candidates
        if asked.name == question and arm.name not in dispatcher.unmeasured.get(name, ())
    )
