"""Advice for SGLang without the plug-in: values for its own options, derived from a table.

An option has one value for all batches, so it cannot gain as much as the plug-in, which decides for
each batch. Each piece of advice says what the value gains over the default, how sure that is, which
batch loses most, and what deciding for each batch would gain on top. All times are of one layer's
attention, not of the whole engine.

The MLA kernel is judged first, then the two limits of MHA together, given that kernel. A gain is
not sure if the batches' total time does not fall, or if a batch becomes much slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum, log

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.releases import RELEASES, Release, checked, release_of
from nsa_tune.reports.advice.advice import (
    Advice,
    AdviceReport,
    EngineOption,
    Unadvised,
    prefills_in,
)
from nsa_tune.reports.advice.gains import BatchTimes, Change, PrefillSettings, advice_on
from nsa_tune.reports.advice.sglang_v4 import advise_v4, measured_by

THRESHOLD = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
CAPACITY = "SGLANG_MAX_KV_CHUNK_CAPACITY"
CHUNK = "chunked_prefill_size"
PREFILL = "dsa_prefill_backend"
DECODE = "dsa_decode_backend"
KV_DTYPE = "kv_cache_dtype"

_INDEXER = ("indexer_prefill", "indexer_topk")
"""Points whose times each chunk of a prompt takes besides the path's."""
_CHUNKS = (2048, 4096, 8192, 16384, 32768)
_PROMPTS = (8192, 32768, 131072)
"""Prompt lengths for which chunk sizes are compared."""
_SECOND = 1.05
"""Factor that changing a second limit must gain over changing only one."""
_GRID = "the measured batches are not your workload; pass a decision log with --log"
_READS_BACK = (
    "Does not work with mixed chunks, PD multiplexing or dLLM. It dequantizes the whole prefix to "
    "{} bytes per kv token, and SGLang spends about 300 us more on each pass"
)


def advise(
    dispatcher: Dispatcher,
    version: str | None = None,
    batches: Iterable[tuple[Batch, float]] | None = None,
    *,
    eager_prefill: bool = False,
) -> AdviceReport:
    """What `dispatcher`'s table advises for SGLang `version`, by default the newest known one.

    `batches` are (batch, weight), for example from a decision log; without them every measured
    batch counts the same. `eager_prefill`: the engine runs prefills without CUDA graphs.

    Raises:
        NoTunedData: without a table, or without prefill measurements in it.
        UsageError: for an unknown release, or when none of `batches` is a prefill.
    """
    newest = ".".join(map(str, RELEASES[-1].last))
    release = release_of(version or newest)
    if release is None:
        raise UsageError(f"SGLang {version} is unknown; known releases: {checked()}")
    setting = dispatcher.setting
    v4 = setting.profile.family == "v4"
    policy = dispatcher.policies.get("prefill")
    if not v4 and (policy is None or not policy.measured):
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    given = None if batches is None else prefills_in(batches)
    measured = measured_by(dispatcher) if policy is None or v4 else policy.measured
    weighted = [(batch, 1.0) for batch in measured] if given is None else given
    if eager_prefill:
        release = replace(release, graph_tokens=0)
    found = (
        [advise_v4(dispatcher, weighted)]
        if policy is None or v4
        else list(_Advisor(dispatcher, policy, release, weighted, given is not None).run())
    )
    return AdviceReport.of(
        dispatcher, "SGLang", version or newest, found, weighted=given is not None
    )


def _argument(field: str) -> str:
    return f"--{field.replace('_', '-')}"


_LIMITS = {"threshold": THRESHOLD, "capacity": CAPACITY}
"""The engine's names of the two limits in `PrefillSettings`."""


class _Advisor:
    """Finds the best value of each option, one after the other, and judges it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        policy: Policy,
        release: Release,
        weighted: Sequence[tuple[Batch, float]],
        given: bool,
    ) -> None:
        self._given = given
        self._setting = dispatcher.setting
        self._policy = policy
        self._baseline = dispatcher.baseline
        self._indexer = [
            one
            for name in _INDEXER
            if (one := dispatcher.policies.get(name)) is not None and one.measured
        ]
        decode = dispatcher.policies.get("decode")
        self._decodes = decode is not None and any(
            one.models for one in decode.candidates if one.name == "fa3"
        )
        self._release = release
        self._graph_tokens = release.graph_tokens
        self._impls = sorted(release.prefill_impls[dispatcher.setting.layout])
        self._timed = [times for batch, w in weighted if (times := self._times_of(batch, w)).mla]
        sparse = next(one for one in policy.point.questions if one.name == "sparse_prefill")
        self._default = PrefillSettings(
            dispatcher.baseline.choose(sparse, policy.measured[0], self._setting),
            self._setting.profile.index_topk,
            self._setting.max_chunk_kv,
        )

    def run(self) -> Iterator[Advice | Unadvised]:
        """Advice on each option in turn."""
        impl = self._impl()
        yield impl
        kept = self._default
        if isinstance(impl, Advice) and impl.verdict is Verdict.WIN:
            kept = _with(kept, "impl", impl.settings[0].value)
        limited = self._best_limits(kept)
        for one in self._limits(kept, limited):
            yield one
            if isinstance(one, Advice) and one.verdict is Verdict.WIN:
                kept = limited
        yield self._chunk(kept)
        yield self._decode()

    def _decode(self) -> Unadvised:
        """No advice: prefills alone are judged here."""
        if self._setting.layout is KVLayout.FP8_PACKED and self._setting.device.arch == "sm90":
            why = "only the default, flashmla_kv, is measured for this pool"
        elif self._decodes:
            why = "only prefills are judged here; `nsa-tune advise --trace` compares decode kernels"
        else:
            why = "SGLang's default for this pool is not measured"
        return Unadvised(_argument(DECODE), why)

    def _impl(self) -> Advice | Unadvised:
        name, default = _argument(PREFILL), self._default.impl
        others = self._other_impls()
        if not others:
            return Unadvised(name, f"only {default} was measured")
        best = self._best(self._default, "impl", others)
        settings = [EngineOption(name, best.impl, default)]
        if self._setting.layout is KVLayout.FP8_PACKED:
            settings.append(EngineOption(_argument(KV_DTYPE), "fp8_e4m3", "auto"))
        changes = self._changes(self._default, best, dense=False)
        found = advice_on(settings, changes, self._impl_note(best.impl))
        return found or Unadvised(name, _no_gain(default))

    def _limits(self, kept: PrefillSettings, best: PrefillSettings) -> Iterator[Advice | Unadvised]:
        """One piece of advice for both limits together, with all else as in `kept`."""
        settings = [
            EngineOption(name, str(getattr(best, field)), str(getattr(kept, field)))
            for field, name in _LIMITS.items()
            if getattr(best, field) != getattr(kept, field)
        ]
        changes = self._changes(kept, best, dense=True)
        found = advice_on(settings, changes, self._limits_note(kept))
        if found is not None:
            yield found if self._given else replace(found, reservation=_GRID)
        for field, name in _LIMITS.items():
            default = getattr(kept, field)
            if found is None:
                yield Unadvised(name, _no_gain(str(default)))
            elif name not in [one.name for one in settings]:
                yield Unadvised(name, f"no value gains {_SECOND - 1:.0%} on top of the other limit")

    def _best_limits(self, kept: PrefillSettings) -> PrefillSettings:
        """The best value of one limit, or of both where that gains enough more.

        Two limits can exclude the same batches from MHA, so the second often gains nothing.
        """
        choices = self._limit_choices()
        single = min(
            (self._best(kept, field, choices[field]) for field in _LIMITS), key=self._log_time
        )
        both, before = single, None
        while both != before:
            before = both
            for field in _LIMITS:
                both = self._best(both, field, [getattr(kept, field), *choices[field]])
        total = fsum(one.weight for one in self._timed if one.dense(kept)) or 1.0
        enough = self._log_time(single) - self._log_time(both) > total * log(_SECOND)
        return both if enough else single

    def _times_of(self, batch: Batch, weight: float) -> BatchTimes:
        allowed = self._policy.survey(batch).latencies
        estimates = self._policy.estimates(batch)
        known = {arm: one for arm, one in estimates.items() if allowed.get(arm) is not None}
        # In a CUDA graph the engine always takes MLA.
        eager = batch.q_tokens > self._graph_tokens
        mha = [one for arm, one in known.items() if arm.startswith("mha/") and eager]
        impls = [one for one in self._impls if self._as_measured(one, batch)]
        mla = {impl: known[arm] for impl in impls if (arm := f"mla/{impl}") in known}
        return BatchTimes(
            batch, weight, min(mha, key=lambda one: one.latency_us, default=None), mla
        )

    def _as_measured(self, impl: str, batch: Batch) -> bool:
        """Whether this release runs `impl` on `batch` in the way that was measured."""
        if impl != "flashmla_sparse" or self._release.passes_topk_length:
            return True
        least = self._setting.profile.index_topk - 1
        return batch.lens is not None and min(prefix for prefix, _ in batch.lens) >= least

    def _other_impls(self) -> list[str]:
        """The other kernels that may run on every batch that the default one may run on."""
        own = self._default.impl
        timed = [times for times in self._timed if own in times.mla]
        return [
            impl
            for impl in self._impls
            if impl != own and timed and all(impl in times.mla for times in timed)
        ]

    def _limit_choices(self) -> dict[str, list[int]]:
        """Values below the default limits: each is the size of a batch on which MHA may run."""
        dense = [times.batch for times in self._timed if times.dense(self._default)]
        lens = {0, *(batch.max_kv for batch in dense)} if dense else set()
        sums = {batch.kv_tokens for batch in dense}
        return {
            "threshold": [one for one in sorted(lens) if one < self._default.threshold],
            "capacity": [one for one in sorted(sums) if one < self._default.capacity],
        }

    def _best(self, base: PrefillSettings, field: str, values: Iterable[object]) -> PrefillSettings:
        """`base`, with `field` set to the best of `values` if one is better."""
        return min([base, *(_with(base, field, one) for one in values)], key=self._log_time)

    def _log_time(self, settings: PrefillSettings) -> float:
        known = [(times, one) for times in self._timed if (one := times.time(settings)) is not None]
        return fsum(times.weight * log(one.latency_us / times.best) for times, one in known)

    def _changes(
        self, before: PrefillSettings, after: PrefillSettings, *, dense: bool
    ) -> list[Change]:
        """The changes of batches that take MHA before (`dense`), or of those that do not."""
        return [
            Change(times, old, new)
            for times in self._timed
            if times.dense(before) is dense
            and (old := times.time(before)) is not None
            and (new := times.time(after)) is not None
        ]

    def _impl_note(self, impl: str) -> str:
        own, notes = self._default.impl, []
        count = sum(own not in times.mla for times in self._timed)
        if count:
            notes.append(f"on {count} more batches {own} is not allowed, or failed")
        if impl == "flashmla_sparse" and self._setting.layout is KVLayout.FP8_PACKED:
            notes.append(_READS_BACK.format(2 * self._setting.profile.latent))
        return ". ".join(notes)

    def _limits_note(self, kept: PrefillSettings) -> str:
        note = "SGLang runs MHA only in eager prefill"
        if self._graph_tokens:
            note += f", by default only above {self._graph_tokens} new tokens"
        if kept.impl != self._default.impl:
            note += f". The gain is on top of {_argument(PREFILL)} {kept.impl}"
        return note

    def _chunk(self, settings: PrefillSettings) -> Advice | Unadvised:
        own = 8192 if self._setting.device.memory < 160 * 2**30 else 16384
        prompts = [length for length in _PROMPTS if self._prompt(length, own, settings)]
        known: dict[int, list[Estimate]] = {}
        for chunk in _CHUNKS:
            times = [self._prompt(length, chunk, settings) for length in prompts]
            if None not in times:
                known[chunk] = [one for one in times if one is not None]
        if not prompts or len(known) < 2:
            why = f"chunks of {own} and of another size are not both within the measured batches"
            return Unadvised(_argument(CHUNK), why)
        before = known.pop(own)
        best = min(known, key=lambda chunk: fsum(log(one.latency_us) for one in known[chunk]))
        changes = [
            Change(BatchTimes(Batch.extend([0], [n]), 1.0, None, {"": old, "new": new}), old, new)
            for n, old, new in zip(prompts, before, known[best], strict=True)
        ]
        note = (
            f"For single prompts of {', '.join(map(str, prompts))} tokens. Memory, latency and "
            "other layers depend on the chunk size too"
        )
        found = advice_on([EngineOption(_argument(CHUNK), str(best), str(own))], changes, note)
        if found is None:
            return Unadvised(_argument(CHUNK), _no_gain(str(own)))
        return replace(found, reservation="this counts attention alone, so test it")

    def _prompt(self, length: int, chunk: int, settings: PrefillSettings) -> Estimate | None:
        """The time of one prompt in chunks; None where a chunk was not measured."""
        parts: list[Estimate] = []
        for start in range(0, length, chunk):
            batch = Batch.extend([start], [min(chunk, length - start)])
            one = self._times_of(batch, 1.0).time(settings)
            if one is None or one.extrapolated:
                return None
            parts += [one, *self._indexers(batch)]
        return Estimate.total(parts)

    def _indexers(self, batch: Batch) -> Iterator[Estimate]:
        """What the indexer takes in a layer of `batch`, as far as it was measured."""
        for policy in self._indexer:
            allowed, every = policy.survey(batch).latencies, policy.estimates(batch)
            question = policy.point.questions[0]
            arm = self._baseline.choose(question, batch, self._setting)
            if arm in allowed and arm in every:
                yield every[arm]


def _with(settings: PrefillSettings, field: str, value: object) -> PrefillSettings:
    return PrefillSettings(**{**settings._asdict(), field: value})


def _no_gain(default: str) -> str:
    return f"no value gains more than {MARGIN:.0%} over the default, {default}"
