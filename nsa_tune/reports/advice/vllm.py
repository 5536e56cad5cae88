"""Advice for vLLM without the plug-in: values for its own options, derived from a table.

vLLM has no option for what costs most: whether short extends count as decodes, and by which kernel
prefills run over an fp8 pool. So most of the advice says what deciding for each batch would gain.
All times are of one layer's attention, not of the whole engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp, fsum, log

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question
from nsa_tune.engines.vllm.releases import RELEASES, checked, release_of
from nsa_tune.reports.advice.advice import (
    Advice,
    AdviceReport,
    EngineOption,
    Unadvised,
    prefills_in,
)
from nsa_tune.reports.advice.gains import BatchTimes, Change, advice_on

FORCE_MQA = "--attention-config.sparse_mla_force_mqa"
PREFILL_BACKEND = "--attention-config.mla_prefill_backend"
BACKEND = "--attention-backend"
KV_DTYPE = "--kv-cache-dtype"
TP, DP = "--tensor-parallel-size", "--data-parallel-size"
PLUGIN = "the plug-in"

_TEST_DP = "this counts attention alone, no communication and no memory, so test it"


def advise(
    dispatcher: Dispatcher,
    version: str | None = None,
    batches: Iterable[tuple[Batch, float]] | None = None,
    *,
    whole: Dispatcher | None = None,
) -> AdviceReport:
    """What `dispatcher`'s table advises for vLLM `version`, by default the newest known one.

    `batches` are (batch, weight), for example from a decision log; without them every measured
    batch counts the same. `whole` answers for all of the model's heads on one GPU, as each has them
    with data-parallel attention.

    Raises:
        NoTunedData: without a table, or without prefill measurements in it.
        UsageError: for an unknown release, or when none of `batches` is a prefill.
    """
    newest = ".".join(map(str, (*RELEASES[-1].version, 0)))
    if release_of(version or newest) is None:
        raise UsageError(f"vLLM {version} is unknown; known releases: {checked()}")
    policy = dispatcher.policies.get("prefill")
    if policy is None or not policy.measured:
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    given = None if batches is None else prefills_in(batches)
    weighted = [(batch, 1.0) for batch in policy.measured] if given is None else given
    found = list(_advised(policy, weighted, whole))
    return AdviceReport.of(dispatcher, "vLLM", version or newest, found, weighted=given is not None)


def _advised(
    policy: Policy, weighted: Sequence[tuple[Batch, float]], whole: Dispatcher | None
) -> Iterator[Advice | Unadvised]:
    own = _Own(policy)
    timed = [times for batch, weight in weighted if (times := own.times(batch, weight)) is not None]
    yield _force_mqa(own, timed)
    yield _data_parallel(own, weighted, whole)
    yield _of_the_plugin(own, timed)
    sm90 = policy.setting.device.arch == "sm90"
    why = "there is one backend for this GPU" if sm90 else "its backends are not compared"
    yield Unadvised(PREFILL_BACKEND, why)
    for option in (BACKEND, KV_DTYPE):
        yield Unadvised(
            option, "backends with other KV layouts have tables of their own; compare those"
        )


class _Own:
    """What vLLM takes by itself, by its baseline."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        questions = {one.name: one for one in policy.point.questions}
        self._path, self._kernel = questions["prefill_path"], questions["sparse_prefill"]

    def times(self, batch: Batch, weight: float) -> BatchTimes | None:
        """The estimated times of what may run on `batch`; None where vLLM's kernel has none."""
        allowed, estimates = self.policy.survey(batch).latencies, self.policy.estimates(batch)
        known = {arm: one for arm, one in estimates.items() if allowed.get(arm) is not None}
        mha = [one for arm, one in known.items() if arm.startswith("mha/")]
        mla = {arm[4:]: one for arm, one in known.items() if arm.startswith("mla/")}
        fastest = min(mha, key=lambda one: one.latency_us, default=None)
        found = BatchTimes(batch, weight, fastest, mla)
        return found if self.time(found) is not None else None

    def mha(self, times: BatchTimes) -> bool:
        """Whether vLLM takes MHA."""
        return self._choice(self._path, times.batch) == "mha"

    def time(self, times: BatchTimes, *, force_mqa: bool = False) -> Estimate | None:
        """The time of what vLLM takes."""
        if not force_mqa and self.mha(times):
            return times.mha
        return times.mla.get(self._choice(self._kernel, times.batch))

    def _choice(self, question: Question, batch: Batch) -> str:
        return VLLM_0_33_0.choose(question, batch, self.policy.setting)


def _changes(pairs: Iterable[tuple[BatchTimes, Estimate | None, Estimate | None]]) -> list[Change]:
    return [
        Change(times, before, after)
        for times, before, after in pairs
        if before is not None and after is not None
    ]


def _force_mqa(own: _Own, timed: Sequence[BatchTimes]) -> Advice | Unadvised:
    changes = _changes(
        (times, own.time(times), own.time(times, force_mqa=True))
        for times in timed
        if own.mha(times)
    )
    note = "MHA also spares the indexer's work, which is not counted"
    found = advice_on([EngineOption(FORCE_MQA, "true", "false")], changes, note)
    return found or Unadvised(FORCE_MQA, "MHA where vLLM takes it is not slower")


def _data_parallel(
    own: _Own, weighted: Sequence[tuple[Batch, float]], whole: Dispatcher | None
) -> Advice | Unadvised:
    """Whether each GPU should have all heads of its own requests."""
    setting = own.policy.setting
    ways = setting.profile.heads // setting.heads
    policy = None if whole is None else whole.policies.get("prefill")
    if ways == 1:
        return Unadvised(DP, "all heads are on this GPU already")
    if policy is None or not policy.measured:
        why = f"nothing is measured for {setting.profile.heads} local heads"
        return Unadvised(DP, f"{why}, as each GPU has them with data-parallel attention")
    others = _Own(policy)
    pairs = []
    for batch, weight in weighted:
        # The group's batch has each GPU's requests together.
        times = others.times(batch, weight)
        group = own.times(_repeated(batch, ways), weight) if batch.lens else None
        if times is not None and group is not None:
            pairs.append((times, own.time(group), others.time(times)))
    changes = [
        one for one in _changes(pairs) if not (one.before.extrapolated or one.after.extrapolated)
    ]
    options = [EngineOption(TP, "1", str(ways)), EngineOption(DP, str(ways), "1")]
    note = f"For batches that give each of {ways} GPUs the same requests"
    found = advice_on(options, changes, note)
    if found is None:
        return Unadvised(DP, "with tensor-parallel attention the same requests take no longer")
    return replace(found, reservation=_TEST_DP)


def _repeated(batch: Batch, ways: int) -> Batch:
    lens = list(batch.lens or ()) * ways
    return Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])


def _of_the_plugin(own: _Own, timed: Sequence[BatchTimes]) -> Unadvised:
    lost = [
        (times.weight, time.latency_us / times.best)
        for times in timed
        if (time := own.time(times)) is not None
    ]
    if not lost:
        return Unadvised(PLUGIN, "vLLM's own choices are not measured")
    weight = fsum(one for one, _ in lost)
    mean = exp(fsum(one * log(ratio) for one, ratio in lost) / weight)
    worst = max(ratio for _, ratio in lost)
    return Unadvised(
        PLUGIN,
        "no option sets which extends count as decodes, and by which kernel prefills run over an "
        f"fp8 pool; deciding for each batch is {mean:.2f}x faster, {worst:.2f}x at most",
    )
