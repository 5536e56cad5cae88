"""Advice: which of SGLang's own settings a table speaks for, without any plug-in.

An engine's setting is one value for all batches, so it can only come near to what the table
answers batch by batch. Each piece of advice says what it gains over the default, how sure that
is, where it loses, and what the table would still gain over it. Times are of one layer's
attention: a gain is one of attention, not of the engine.

Each piece is judged beside all the others: by what the engine would lose without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, hypot, log
from typing import NamedTuple

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.batch import Batch, Mode
from nsa_tune.backend.dispatcher import Dispatcher
from nsa_tune.backend.integrations.sglang.releases import RELEASES, Release, checked, release_of
from nsa_tune.backend.policy import Policy
from nsa_tune.backend.surface import Estimate
from nsa_tune.backend.verdict import MARGIN, Verdict
from nsa_tune.reports.advice import Advice, Advised, Unadvised

__all__ = ["advise"]

THRESHOLD = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
CAPACITY = "SGLANG_MAX_KV_CHUNK_CAPACITY"
CHUNK = "chunked_prefill_size"
PREFILL = "dsa_prefill_backend"
DECODE = "dsa_decode_backend"

_CHUNKS = (2048, 4096, 8192, 16384, 32768)
_PROMPTS = (8192, 32768, 131072)
"""Prompts in tokens over which chunk sizes are compared."""
_EAGER = (
    "MHA runs in eager prefill only: under a prefill CUDA graph, the default on CUDA, SGLang "
    "takes MLA and this changes nothing"
)


def advise(
    dispatcher: Dispatcher,
    version: str | None = None,
    batches: Iterable[tuple[Batch, float]] | None = None,
) -> Advised:
    """What `dispatcher`'s table advises for SGLang `version`, by default the newest known.

    `batches` are (batch, weight), from a decision log for example; without them every measured
    batch counts the same.

    Raises:
        NoTunedData: without a table, or without prefill measurements in it.
        UsageError: for a release that nothing is known of.
    """
    newest = ".".join(map(str, RELEASES[-1].last))
    release = release_of(version or newest)
    if release is None:
        raise UsageError(f"nothing is known of SGLang {version}; known are {checked()}")
    policy = dispatcher.policies.get("prefill")
    if policy is None or not policy.measured:
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    given = None if batches is None else [one for one in batches if one[0].mode is Mode.EXTEND]
    weighted = [(batch, 1.0) for batch in policy.measured] if given is None else given
    setting = dispatcher.setting
    found = list(_Advisor(dispatcher, policy, release, weighted).run())
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


_NAMES = {"impl": _argument(PREFILL), "capacity": CAPACITY, "threshold": THRESHOLD}
"""The engine's names of the fields of `_Settings`. Both limits can keep long batches from MHA:
the capacity is judged first, so that it stays only where the threshold does not suffice."""


# --- what a batch costs with some settings


class _Settings(NamedTuple):
    """The engine's settings that decide a prefill's path and kernel."""

    impl: str
    threshold: int
    capacity: int


@dataclass(frozen=True, slots=True)
class _Cell:
    """One batch with the estimates of what may run on it."""

    batch: Batch
    weight: float
    mha: Estimate | None
    mla: dict[str, Estimate]

    def dense(self, settings: _Settings) -> bool:
        """Whether the engine takes MHA with these settings."""
        fits = self.batch.max_kv <= settings.threshold
        return self.mha is not None and fits and self.batch.kv_tokens <= settings.capacity

    def cost(self, settings: _Settings) -> Estimate | None:
        """The batch's time with these settings; None where nothing is known of it."""
        return self.mha if self.dense(settings) else self.mla.get(settings.impl)

    @property
    def best(self) -> float:
        """The least time of all that may run."""
        every = [*self.mla.values(), *([self.mha] if self.mha else [])]
        return min(one.latency_us for one in every)


class _Change(NamedTuple):
    """One batch before and after."""

    cell: _Cell
    before: Estimate
    after: Estimate

    @property
    def log_gain(self) -> float:
        """log(before / after)."""
        return log(self.before.latency_us / self.after.latency_us)

    def log_error(self, up: bool) -> float:
        """How far the gain may be off to one side; the two times err independently."""
        if self.before is self.after:
            return 0.0
        slow, quick = (self.before, self.after) if up else (self.after, self.before)
        return hypot(log(slow.high_us / slow.latency_us), log(quick.latency_us / quick.low_us))


class _Advisor:
    """Finds the settings that cost least together, then judges each of them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        policy: Policy,
        release: Release,
        weighted: Sequence[tuple[Batch, float]],
    ) -> None:
        self._setting = dispatcher.setting
        self._policy = policy
        self._release = release
        self._impls = sorted(release.prefill_impls[dispatcher.setting.layout])
        self._cells = [cell for batch, w in weighted if (cell := self._cell(batch, w)).mla]
        sparse = next(one for one in policy.point.answers if one.name == "sparse_prefill")
        self._default = _Settings(
            dispatcher.rule.choose(sparse, policy.measured[0], self._setting),
            self._setting.profile.index_topk,
            self._setting.max_chunk_kv,
        )

    def run(self) -> Iterator[Advice | Unadvised]:
        """Each setting in turn."""
        choices: dict[str, Sequence[object]] = {"impl": self._other_impls(), **self._limits()}
        best = self._least(choices)
        kept = self._needed(best)
        for field, name in _NAMES.items():
            if choices[field]:
                value = getattr(best, field)
                yield self._found(field, _with(kept, field, value))
            else:
                why = f"nothing but {getattr(self._default, field)} was measured"
                yield Unadvised(name, why)
        yield self._chunk(kept)
        yield Unadvised(_argument(DECODE), "the table has no measurements of decode attention")

    def _cell(self, batch: Batch, weight: float) -> _Cell:
        allowed = self._policy.survey(batch).latencies
        estimates = self._policy.estimates(batch)
        known = {arm: one for arm, one in estimates.items() if allowed.get(arm) is not None}
        mha = [one for arm, one in known.items() if arm.startswith("mha/")]
        mla = {impl: known[arm] for impl in self._impls if (arm := f"mla/{impl}") in known}
        return _Cell(batch, weight, min(mha, key=lambda one: one.latency_us, default=None), mla)

    def _other_impls(self) -> list[str]:
        """Kernels that may run on all batches that the default one may run on."""
        own = self._default.impl
        return [
            impl
            for impl in self._impls
            if impl != own and all(impl in cell.mla for cell in self._cells if own in cell.mla)
        ]

    def _limits(self) -> dict[str, list[int]]:
        """Limits below the defaults, each of them the size of a batch on which MHA may run."""
        dense = [cell.batch for cell in self._cells if cell.dense(self._default)]
        lens = {0, *(batch.max_kv for batch in dense)} if dense else set()
        sums = {batch.kv_tokens for batch in dense}
        return {
            "threshold": [one for one in sorted(lens) if one < self._default.threshold],
            "capacity": [one for one in sorted(sums) if one < self._default.capacity],
        }

    def _least(self, choices: Mapping[str, Sequence[object]]) -> _Settings:
        """The settings of least cost, by going from one field to the next until none changes."""
        best, before = self._default, None
        while best != before:
            before = best
            for field, values in choices.items():
                trials = [best, *(_with(best, field, value) for value in values)]
                best = min(trials, key=lambda one: _mean_log_cost(self._cells, one))
        return best

    def _needed(self, best: _Settings) -> _Settings:
        """`best` without what gains too little beside the rest, or is not sure to gain."""
        kept, before = best, None
        while kept != before:
            before = kept
            for field in _NAMES:
                found = self._found(field, kept)
                if not (isinstance(found, Advice) and found.verdict is Verdict.WIN):
                    kept = _with(kept, field, getattr(self._default, field))
        return kept

    def _found(self, field: str, settings: _Settings) -> Advice | Unadvised:
        """What `settings` gain by their `field`, over the same ones with its default."""
        default = getattr(self._default, field)
        without, value = _with(settings, field, default), getattr(settings, field)
        changes = [
            _Change(cell, before, after)
            for cell in self._cells
            if (before := cell.cost(without)) is not None
            and (after := cell.cost(settings)) is not None
            and self._has_a_say(field, cell, without, settings)
        ]
        note = self._beyond() if field == "impl" else _EAGER
        return _weigh(_NAMES[field], str(value), str(default), changes, note)

    def _has_a_say(self, field: str, cell: _Cell, without: _Settings, final: _Settings) -> bool:
        if field == "impl":
            return not (cell.dense(without) and cell.dense(final))
        return cell.dense(self._default)

    def _beyond(self) -> str:
        own = self._default.impl
        count = sum(own not in cell.mla for cell in self._cells)
        return f"{own} must not run on {count} more batches, or failed there" if count else ""

    def _chunk(self, settings: _Settings) -> Advice | Unadvised:
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
            _Change(_Cell(Batch.extend([0], [n]), 1.0, None, {"": old, "new": new}), old, new)
            for n, old, new in zip(prompts, before, known[best], strict=True)
        ]
        note = (
            f"Single prompts of {', '.join(map(str, prompts))} tokens; memory, latency and the "
            "other layers depend on it as well"
        )
        return _weigh(_argument(CHUNK), str(best), str(own), changes, note)

    def _prompt(self, length: int, chunk: int, settings: _Settings) -> Estimate | None:
        """The time of one prompt in chunks; None where a part of it is not known."""
        parts: list[Estimate] = []
        for start in range(0, length, chunk):
            batch = Batch.extend([start], [min(chunk, length - start)])
            one = self._cell(batch, 1.0).cost(settings)
            if one is None or one.extrapolated:
                return None
            parts.append(one)
        return Estimate(
            fsum(one.latency_us for one in parts),
            fsum(one.low_us for one in parts),
            fsum(one.high_us for one in parts),
            False,
        )


def _with(settings: _Settings, field: str, value: object) -> _Settings:
    return _Settings(**{**settings._asdict(), field: value})


def _mean_log_cost(cells: Sequence[_Cell], settings: _Settings) -> float:
    known = [(cell, one) for cell in cells if (one := cell.cost(settings)) is not None]
    return fsum(cell.weight * log(one.latency_us / cell.best) for cell, one in known)


def _weigh(
    name: str, value: str, default: str, changes: Sequence[_Change], note: str
) -> Advice | Unadvised:
    """What the changes come to."""
    total = fsum(one.cell.weight for one in changes)

    def mean(of: Callable[[_Change], float]) -> float:
        return exp(fsum(one.cell.weight * of(one) for one in changes) / total)

    if not changes or (gain := mean(lambda one: one.log_gain)) <= 1 + MARGIN:
        return Unadvised(name, f"no value gains more than {MARGIN:.0%} over the default, {default}")
    low = gain / mean(lambda one: one.log_error(up=False))
    worst = min(changes, key=lambda one: one.log_gain)
    slower = worst.log_gain < 0
    return Advice(
        name=name,
        value=value,
        default=default,
        verdict=Verdict.WIN if low > 1 else Verdict.UNSURE,
        gain=gain,
        low=low,
        high=gain * mean(lambda one: one.log_error(up=True)),
        batches=len(changes),
        changed=sum(one.before is not one.after for one in changes),
        worst=exp(-worst.log_gain) if slower else 1.0,
        worst_batch=str(worst.cell.batch) if slower else "",
        lost=mean(lambda one: log(one.after.latency_us / one.cell.best)),
        lost_at_worst=max(one.after.latency_us / one.cell.best for one in changes),
        note=note,
    )
