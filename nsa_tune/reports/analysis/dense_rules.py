"""Advice for dense MLA: which constants of SGLang and vLLM serve, by a table's attention times.

Engines choose between expanded MHA and absorbed MLA by one constant each. Each rule is priced on
the batches of a table, with the kernels that the engine itself has for either path, and beside it
the value of its constant that loses least. Attention alone: whole passes were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.baselines import SGLANG_0_5_23, SGLANG_0_5_23_FULL
from nsa_tune.backend.baselines.sglang_0_5_23 import dense_eagerly
from nsa_tune.backend.baselines.vllm_0_33_0 import dense_path
from nsa_tune.backend.costmodel.regret import regret
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Status

THRESHOLD = "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"
_PREFIXES = (0, *(2**k for k in range(7, 18)))
"""Cached tokens from which SGLang may expand."""
_NEW = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
"""New tokens up to which vLLM may absorb."""
_ABSORBED = {"sglang": "mla/fa3", "vllm": "mla/fa3_paged"}
_EAGER = (
    "Not ranked: without a graph a pass waits for its launches, which is not counted. In the one "
    "engine that ran first tokens took up to five times as long (docs/gains.md): keep the graphs."
)
_WHOLE, _MERGED = "mha/sgl_fa3", "mha/sgl_fa3_merged"
_NOTES = {
    "sglang": f"Attention alone. {THRESHOLD} is read without a graph only. `full` gives wrong "
    "answers behind cached tokens: on an H200 they stayed when the last of these tokens changed.",
    "vllm": "Attention alone. vLLM's MHA also copies keys and launches more: small steps that took "
    "it took longer. The plug-in lowers the threshold for a step, where it is asked to.",
}

Path = Callable[[Batch], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an engine chooses, and what that loses."""

    name: str
    mean: float
    """What attention takes more than by the faster path, on the mean over batches."""
    worst: float
    worst_batch: str
    waits: bool = False
    """Whether its passes run without a graph, and so wait for what is not counted."""


@dataclass(frozen=True, slots=True)
class DenseAdvice:
    """What each rule loses on the batches of one table."""

    subject: str
    batches: int
    rules: Sequence[Rule]
    note: str
    """What is not counted."""

    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        return {"schema": "nsa-tune/dense-advice/1", **asdict(self)}

    def lines(self) -> Iterator[str]:
        """The same as text."""
        yield f"{self.subject}: time above the faster of MHA and MLA, on {self.batches} batches"
        yield ""
        width = max(len(rule.name) for rule in self.rules)
        for rule in sorted(self.rules, key=lambda rule: rule.waits):
            name = f"{rule.name}{' *' * rule.waits}".ljust(width + 4)
            yield f"{name}mean {rule.mean:7.1%}  worst {rule.worst:8.0%}  on {rule.worst_batch}"
        if any(rule.waits for rule in self.rules):
            yield f"* {_EAGER}"
        yield ""
        yield self.note


def advised(dispatcher: Dispatcher, engine: str) -> DenseAdvice:
    """What the rules of `engine` ("sglang" or "vllm") lose, by the dispatcher's table.

    Raises:
        UsageError: where the engine has another kernel than FlashAttention-3.
        NoTunedData: when the table has no batches with both paths.
    """
    setting = dispatcher.setting
    if setting.device.arch != "sm90":
        raise UsageError(f"dense MLA is advised on for Hopper, not for {setting.device.name}")
    costs = _costs(dispatcher, engine)
    if not costs:
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    rules = [_rule(name, path, costs) for name, path in _paths(dispatcher, engine, costs)]
    subject = f"{setting.device.name}, {setting.profile.name}, {setting.heads} local heads"
    return DenseAdvice(subject, len(costs), rules, _NOTES[engine])


def _costs(dispatcher: Dispatcher, engine: str) -> Mapping[Batch, Mapping[str, float]]:
    """By batch: microseconds of a layer by each path, where both were measured."""
    times: dict[str, dict[str, float]] = {}
    for row in dispatcher.policies["dense_prefill"].rows:
        if row.status is Status.OK and row.latency_us is not None:
            times.setdefault(row.batch, {})[row.arm] = row.latency_us
    costs = {}
    for text, by_arm in times.items():
        batch = Batch.parse(text)
        # SGLang expands all at once as far as that has room, vLLM always in two parts.
        merged = batch.prefix_tokens and (engine == "vllm" or _WHOLE not in by_arm)
        mha, mla = by_arm.get(_MERGED if merged else _WHOLE), by_arm.get(_ABSORBED[engine])
        if mha is not None and mla is not None:
            costs[batch] = {"mha": mha, "mla": mla}
    return costs


def _paths(
    dispatcher: Dispatcher, engine: str, costs: Mapping[Batch, Mapping[str, float]]
) -> Iterator[tuple[str, Path]]:
    setting = dispatcher.setting
    if engine == "vllm":
        yield "vLLM 0.33.0, MHA beyond 512 new tokens", dense_path(512)
        best = min(_NEW, key=lambda most: _mean(dense_path(most), costs))
        yield f"MHA beyond {best} new tokens (no flag)", dense_path(best)
    else:
        question = dispatcher.policies["dense_prefill"].point.questions[0]
        for name, baseline in (
            ("SGLang 0.5.23, absorbing prefill graphs", SGLANG_0_5_23),
            ("--cuda-graph-backend-prefill full", SGLANG_0_5_23_FULL),
        ):
            yield name, baseline.chooser(question, setting)
        yield "--disable-prefill-cuda-graph", _eager(setting, 8192)
        best = min(_PREFIXES, key=lambda tokens: _mean(_eager(setting, tokens), costs))
        yield f"the same with {THRESHOLD}={best}", _eager(setting, best)


def _eager(setting: Setting, threshold: int) -> Path:
    path = dense_eagerly(setting, threshold)
    assert callable(path), "by batch on Hopper"
    return path


def _mean(path: Path, costs: Mapping[Batch, Mapping[str, float]]) -> float:
    return sum(regret(us, path(batch)) for batch, us in costs.items()) / len(costs)


def _rule(name: str, path: Path, costs: Mapping[Batch, Mapping[str, float]]) -> Rule:
    worst = max(costs, key=lambda batch: regret(costs[batch], path(batch)))
    waits = "--disable-prefill-cuda-graph" in name or THRESHOLD in name
    return Rule(name, _mean(path, costs), regret(costs[worst], path(worst)), str(worst), waits)
