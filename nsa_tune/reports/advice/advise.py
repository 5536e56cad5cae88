"""Advice: which of SGLang's own settings a table speaks for, without any plug-in.

An engine's setting is one value for all batches, so it can only come near to what the table
answers batch by batch. Each piece of advice says what it gains over the default, how sure that
is, where it loses, and what the table would still gain over it. Times are of one layer's
attention: a gain is one of attention, not of the engine.

The kernel is judged first, by itself; then the two limits of MHA, together, beside it. A gain
that all batches together do not have, or that costs one of them too much, is never sure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum, log

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import MARGIN, Verdict
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.sglang.releases import RELEASES, Release, checked, release_of
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.reports.advice.advise_v4 import advise_v4, measured_by
from nsa_tune.reports.advice.limits import Advice, Advised, Setting, Unadvised
from nsa_tune.reports.advice.weighing import Cell, Change, Settings, weigh

__all__ = ["advise"]

THRESHOLD = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
CAPACITY = "SGLANG_MAX_KV_CHUNK_CAPACITY"
CHUNK = "chunked_prefill_size"
PREFILL = "dsa_prefill_backend"
DECODE = "dsa_decode_backend"
KV_DTYPE = "kv_cache_dtype"

_CHUNKS = (2048, 4096, 8192, 16384, 32768)
_PROMPTS = (8192, 32768, 131072)
"""Prompts in tokens over which chunk sizes are compared."""
_SECOND = 1.05
"""What a second limit must gain beside the first."""
_GRID = "the measured batches are no workload, so weight them by --log"
_READS_BACK = (
    "Not with mixed chunks, PD multiplexing or dLLM, whose batches it cannot read. It reads the "
    "whole prefix back, in {} bytes a kv token, and SGLang pays some 300 us a pass for it besides"
)


def advise(
    dispatcher: Dispatcher,
    version: str | None = None,
    batches: Iterable[tuple[Batch, float]] | None = None,
    *,
    eager_prefill: bool = False,
) -> Advised:
    """What `dispatcher`'s table advises for SGLang `version`, by default the newest known.

    `batches` are (batch, weight), from a decision log for example; without them every measured
    batch counts the same. `eager_prefill` is for an engine whose prefills are no CUDA graphs.

    Raises:
        NoTunedData: without a table, or without prefill measurements in it.
        UsageError: for a release that nothing is known of, or when no batch given is a prefill.
    """
    newest = ".".join(map(str, RELEASES[-1].last))
    release = release_of(version or newest)
    if release is None:
        raise UsageError(f"nothing is known of SGLang {version}; known are {checked()}")
    setting = dispatcher.setting
    v4 = setting.profile.family == "v4"
    policy = dispatcher.policies.get("prefill")
    if not v4 and (policy is None or not policy.measured):
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    given = None if batches is None else [one for one in batches if one[0].mode is Mode.EXTEND]
    if given is not None and not given:
        raise UsageError("there is no prefill among the batches to weight by")
    measured = measured_by(dispatcher) if policy is None or v4 else policy.measured
    weighted = [(batch, 1.0) for batch in measured] if given is None else given
    if eager_prefill:
        release = replace(release, graph_tokens=0)
    found = (
        [advise_v4(dispatcher, weighted)]
        if policy is None or v4
        else list(_Advisor(dispatcher, policy, release, weighted, given is not None).run())
    )
    return Advised(
        "SGLang",
        version or newest,
        setting.device.name,
        setting.profile.name,
        setting.heads,
        str(setting.layout),
        dispatcher.source,
        "each measured batch counts the same" if given is None else "weighted by the batches given",
        tuple(one for one in found if isinstance(one, Advice)),
        tuple(one for one in found if isinstance(one, Unadvised)),
    )


def _argument(field: str) -> str:
    return f"--{field.replace('_', '-')}"


_LIMITS = {"threshold": THRESHOLD, "capacity": CAPACITY}
"""The engine's names of these fields of `Settings`."""


class _Advisor:
    """Finds the settings that cost least, one after the other, and judges them."""

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
        self._release = release
        self._graph_tokens = release.graph_tokens
        self._impls = sorted(release.prefill_impls[dispatcher.setting.layout])
        self._cells = [cell for batch, w in weighted if (cell := self._cell(batch, w)).mla]
        sparse = next(one for one in policy.point.answers if one.name == "sparse_prefill")
        self._default = Settings(
            dispatcher.rule.choose(sparse, policy.measured[0], self._setting),
            self._setting.profile.index_topk,
            self._setting.max_chunk_kv,
        )

    def run(self) -> Iterator[Advice | Unadvised]:
        """Each setting in turn."""
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
        """In decoding SGLang's flashmla_sparse reads bf16 pools only; its fa3 is no arm here."""
        if self._setting.layout is KVLayout.FP8_PACKED and self._setting.device.arch == "sm90":
            why = "of SGLang's kernels for this pool only the default, flashmla_kv, is measured"
        else:
            why = "SGLang's default for this pool is not among what is measured"
        return Unadvised(_argument(DECODE), why)

    def _impl(self) -> Advice | Unadvised:
        name, default = _argument(PREFILL), self._default.impl
        others = self._other_impls()
        if not others:
            return Unadvised(name, f"nothing but {default} was measured")
        best = self._best(self._default, "impl", others)
        settings = [Setting(name, best.impl, default)]
        if self._setting.layout is KVLayout.FP8_PACKED:
            settings.append(Setting(_argument(KV_DTYPE), "fp8_e4m3", "auto"))
        changes = self._changes(self._default, best, dense=False)
        found = weigh(settings, changes, self._impl_note(best.impl))
        return found or Unadvised(name, _no_gain(default))

    def _limits(self, kept: Settings, best: Settings) -> Iterator[Advice | Unadvised]:
        """One piece of advice for both limits together, given what is `kept` besides."""
        settings = [
            Setting(name, str(getattr(best, field)), str(getattr(kept, field)))
            for field, name in _LIMITS.items()
            if getattr(best, field) != getattr(kept, field)
        ]
        changes = self._changes(kept, best, dense=True)
        found = weigh(settings, changes, self._limits_note(kept))
        if found is not None:
            yield found if self._given else replace(found, reservation=_GRID)
        for field, name in _LIMITS.items():
            default = getattr(kept, field)
            if found is None:
                yield Unadvised(name, _no_gain(str(default)))
            elif name not in [one.name for one in settings]:
                yield Unadvised(name, f"no value gains {_SECOND - 1:.0%} beside the other limit")

    def _best_limits(self, kept: Settings) -> Settings:
        """The best single limit, or both where the second gains enough beside it.

        Both can keep a long batch from MHA.
        """
        choices = self._limit_choices()
        single = min(
            (self._best(kept, field, choices[field]) for field in _LIMITS), key=self._log_cost
        )
        both, before = single, None
        while both != before:
            before = both
            for field in _LIMITS:
                both = self._best(both, field, [getattr(kept, field), *choices[field]])
        total = fsum(one.weight for one in self._cells if one.dense(kept)) or 1.0
        enough = self._log_cost(single) - self._log_cost(both) > total * log(_SECOND)
        return both if enough else single

    def _cell(self, batch: Batch, weight: float) -> Cell:
        allowed = self._policy.survey(batch).latencies
        estimates = self._policy.estimates(batch)
        known = {arm: one for arm, one in estimates.items() if allowed.get(arm) is not None}
        # Within a CUDA graph the engine takes MLA.
        eager = batch.q_tokens > self._graph_tokens
        mha = [one for arm, one in known.items() if arm.startswith("mha/") and eager]
        impls = [one for one in self._impls if self._as_measured(one, batch)]
        mla = {impl: known[arm] for impl in impls if (arm := f"mla/{impl}") in known}
        return Cell(batch, weight, min(mha, key=lambda one: one.latency_us, default=None), mla)

    def _as_measured(self, impl: str, batch: Batch) -> bool:
        """Whether this release runs `impl` as it was measured."""
        if impl != "flashmla_sparse" or self._release.passes_topk_length:
            return True
        least = self._setting.profile.index_topk - 1
        return batch.lens is not None and min(prefix for prefix, _ in batch.lens) >= least

    def _other_impls(self) -> list[str]:
        """Kernels that may run on all batches that the default one may run on."""
        own = self._default.impl
        cells = [cell for cell in self._cells if own in cell.mla]
        return [
            impl
            for impl in self._impls
            if impl != own and cells and all(impl in cell.mla for cell in cells)
        ]

    def _limit_choices(self) -> dict[str, list[int]]:
        """Limits below the defaults, each of them the size of a batch on which MHA may run."""
        dense = [cell.batch for cell in self._cells if cell.dense(self._default)]
        lens = {0, *(batch.max_kv for batch in dense)} if dense else set()
        sums = {batch.kv_tokens for batch in dense}
        return {
            "threshold": [one for one in sorted(lens) if one < self._default.threshold],
            "capacity": [one for one in sorted(sums) if one < self._default.capacity],
        }

    def _best(self, base: Settings, field: str, values: Iterable[object]) -> Settings:
        """`base`, or what is better with one of `values`."""
        return min([base, *(_with(base, field, one) for one in values)], key=self._log_cost)

    def _log_cost(self, settings: Settings) -> float:
        known = [(cell, one) for cell in self._cells if (one := cell.cost(settings)) is not None]
        return fsum(cell.weight * log(one.latency_us / cell.best) for cell, one in known)

    def _changes(self, before: Settings, after: Settings, *, dense: bool) -> list[Change]:
        """The batches that run by MHA before, or those that do not."""
        return [
            Change(cell, old, new)
            for cell in self._cells
            if cell.dense(before) is dense
            and (old := cell.cost(before)) is not None
            and (new := cell.cost(after)) is not None
        ]

    def _impl_note(self, impl: str) -> str:
        own, notes = self._default.impl, []
        count = sum(own not in cell.mla for cell in self._cells)
        if count:
            notes.append(f"{own} must not run on {count} more batches, or failed there")
        if impl == "flashmla_sparse" and self._setting.layout is KVLayout.FP8_PACKED:
            notes.append(_READS_BACK.format(2 * self._setting.profile.latent))
        return ". ".join(notes)

    def _limits_note(self, kept: Settings) -> str:
        note = "MHA runs in eager prefill only"
        if self._graph_tokens:
            note += f", by default above {self._graph_tokens} new tokens, where prefill is no graph"
        if kept.impl != self._default.impl:
            note += f". The gain is beside that of {_argument(PREFILL)} {kept.impl}"
        return note

    def _chunk(self, settings: Settings) -> Advice | Unadvised:
        own = 8192 if self._setting.device.memory < 160 * 2**30 else 16384
        prompts = [length for length in _PROMPTS if self._prompt(length, own, settings)]
        known: dict[int, list[Estimate]] = {}
        for chunk in _CHUNKS:
            times = [self._prompt(length, chunk, settings) for length in prompts]
            if None not in times:
                known[chunk] = [one for one in times if one is not None]
        if not prompts or len(known) < 2:
            why = f"prompts in chunks of {own} and of another size are beyond what was measured"
            return Unadvised(_argument(CHUNK), why)
        before = known.pop(own)
        best = min(known, key=lambda chunk: fsum(log(one.latency_us) for one in known[chunk]))
        changes = [
            Change(Cell(Batch.extend([0], [n]), 1.0, None, {"": old, "new": new}), old, new)
            for n, old, new in zip(prompts, before, known[best], strict=True)
        ]
        note = (
            f"Single prompts of {', '.join(map(str, prompts))} tokens; memory, latency and the "
            "other layers depend on it as well"
        )
        found = weigh([Setting(_argument(CHUNK), str(best), str(own))], changes, note)
        if found is None:
            return Unadvised(_argument(CHUNK), _no_gain(str(own)))
        return replace(found, reservation="attention alone, so try it")

    def _prompt(self, length: int, chunk: int, settings: Settings) -> Estimate | None:
        """The time of one prompt in chunks; None where a part of it is not known."""
        parts: list[Estimate] = []
        for start in range(0, length, chunk):
            batch = Batch.extend([start], [min(chunk, length - start)])
            one = self._cell(batch, 1.0).cost(settings)
            if one is None or one.extrapolated:
                return None
            parts.append(one)
        return Estimate.total(parts)


def _with(settings: Settings, field: str, value: object) -> Settings:
    return Settings(**{**settings._asdict(), field: value})


def _no_gain(default: str) -> str:
    return f"no value gains more than {MARGIN:.0%} over the default, {default}"
