"""Whole configurations of SGLang, ranked by the time and the memory that a trace takes under each.

One replay tells three of them: with the engine's default kernels, with the flags for kernels that
take the least time on the trace, and with the plug-in.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.reports.replay.flags import DECODE_FLAG, DEFAULTS, PREFILL_FLAG, THRESHOLD, Flags
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.tally import Tally

_INDEX_KEY_BYTES = 132
"""Of a token in the indexer's cache: 128 e4m3 values and their scale."""
_OFF = "NSA_TUNE_DISABLE"
"""The variable that switches the plug-in off."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What an engine is started with. Memory and rates are those of one rank."""

    kv_dtype: str
    tp: int
    dp: int
    """Ranks of data-parallel attention; 1: attention is split over heads."""
    chunk: int
    """chunked_prefill_size, of all ranks together."""
    graphs: bool
    """Whether prefills run as CUDA graphs."""
    next_n: int
    plugin: bool
    prefill: Flags = DEFAULTS
    decode: Flags = DEFAULTS

    def flags(self) -> dict[str, str]:
        """Launch arguments, and environment variables, by name; "" for one without a value."""
        kv_dtype = "fp8_e4m3" if self.kv_dtype == "fp8" else "bfloat16"
        found = {"--tp": str(self.tp)}
        if self.dp > 1:
            found |= {"--dp": str(self.dp), "--enable-dp-attention": ""}
        found |= {"--kv-cache-dtype": kv_dtype, "--chunked-prefill-size": str(self.chunk)}
        if not self.graphs:
            found["--disable-prefill-cuda-graph"] = ""
        if self.prefill.kernel is not None:
            found[PREFILL_FLAG] = self.prefill.kernel
        if self.decode.kernel is not None:
            found[DECODE_FLAG] = self.decode.kernel
        if self.next_n > 1:
            found |= {
                "--speculative-algorithm": "NEXTN",
                "--speculative-num-steps": str(self.next_n - 1),
                "--speculative-eagle-topk": "1",
                "--speculative-num-draft-tokens": str(self.next_n),
            }
        if self.prefill.threshold is not None:
            found[THRESHOLD] = str(self.prefill.threshold)
        return found

    def arguments(self) -> str:
        """The launch arguments for a shell."""
        words: list[str] = []
        for name, value in self.flags().items():
            if name.startswith("--"):
                words += [name, value] if value else [name]
        return shlex.join(words)

    def environment(self) -> list[str]:
        """Assignments of environment variables."""
        return [
            f"{name}={value}" for name, value in self.flags().items() if not name.startswith("--")
        ]


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration on the trace. Times and memory are of one rank."""

    configuration: Configuration
    attention_s: float
    low_s: float
    """Ends of `attention_s`, if every estimate errs to the same side."""
    high_s: float
    passes_s: float | None
    """Whole passes; None without a model of the rest."""
    memory_gib: float
    """KV pool and indexer's keys of the requests that run at once, and of the prefix cache."""
    device_gib: float
    """Memory of the whole GPU; 0 where it is not known."""
    unpriced: tuple[str, ...]
    """Steps without a price."""
    pareto: bool = False
    """Whether no other configuration takes less of time or memory, and no more of the other."""
    unsure: tuple[str, ...] = ()
    """Why it may not be faster than the first one after all; empty where it surely is."""
    pass_times: str = ""
    """Where measured times of whole prefills come from; empty where all are priced."""

    @property
    def seconds(self) -> float:
        """What it is ranked by."""
        return self.attention_s if self.passes_s is None else self.passes_s

    @property
    def fastest(self) -> float:
        """`seconds`, if every estimate of attention errs upwards."""
        return self.seconds - (self.attention_s - self.low_s)

    @property
    def slowest(self) -> float:
        """`seconds`, if every one errs downwards."""
        return self.seconds + (self.high_s - self.attention_s)


@dataclass(frozen=True, slots=True)
class Configurations:
    """All of them, the fastest first."""

    trace: str
    default: Ranked
    """What the others are compared with: the engine's own choices."""
    ranked: tuple[Ranked, ...]
    given: Mapping[str, str]
    """Flags to compare the best one with; empty where none are given."""
    skipped: tuple[str, ...]
    """What was not compared, and why."""

    @property
    def best(self) -> Ranked:
        """The fastest that is surely faster than the default, else the default."""
        sure = [one for one in self.ranked if not one.unsure]
        return min([self.default, *sure], key=lambda one: one.seconds)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": "nsa-tune/configurations/1",
            "trace": self.trace,
            "default": _shown(self.default),
            "best": _shown(self.best),
            "ranked": [_shown(one) for one in self.ranked],
            "given": dict(self.given),
            "differences": differences(self.given, self.best.configuration) if self.given else [],
            "skipped": list(self.skipped),
        }


def _shown(one: Ranked) -> dict[str, Any]:
    own = one.configuration
    return {**asdict(one), "flags": own.arguments(), "environment": own.environment()}


def token_bytes(setting: Setting) -> int:
    """What a token takes in all layers: in the KV pool and in the indexer's cache."""
    profile = setting.profile
    layout: KVLayout = setting.layout
    own = layout.token_bytes(profile.rank, profile.rope)
    return profile.layers * (own + _INDEX_KEY_BYTES)


def ranked(
    tally: Tally, base: Configuration, pool_tokens: int, *, plugin: bool = True
) -> Iterator[Ranked]:
    """The configurations that one replay tells: `base`, the one with the best flags, and the one
    with the plug-in. `pool_tokens` are those of requests at once and of the prefix cache."""
    memory = pool_tokens * token_bytes(tally.pricer.setting) / 2**30
    device = tally.pricer.setting.device.memory / 2**30
    kinds = [extend for extend, kind in tally.kinds.items() if kind.passes]
    unpriced = tuple(dict.fromkeys(name for e in kinds for name in tally.kinds[e].unpriced))

    def by(way: Way, configuration: Configuration) -> Ranked:
        found = [tally.total(extend, way) for extend in kinds]
        whole = sum(tally.kinds[extend].whole_ms[way] for extend in kinds) / 1e3
        return Ranked(
            configuration,
            sum(one.latency_us for one in found) / 1e6,
            sum(one.low_us for one in found) / 1e6,
            sum(one.high_us for one in found) / 1e6,
            None if tally.rest is None else whole,
            memory,
            device,
            unpriced,
            pass_times="" if tally.whole is None else tally.whole.source,
        )

    yield by(Way.ENGINE, base)
    static = {extend: tally.static(extend) for extend in kinds}
    flags = {extend: one[0] for extend, one in static.items() if one is not None}
    if any(one != DEFAULTS for one in flags.values()) and None not in static.values():
        attention = sum(one[1] for one in static.values() if one is not None) / 1e6
        whole = sum(tally.static_ms(extend) or 0.0 for extend in kinds) / 1e3
        # The intervals of flags are not kept; those of the best arms are about as wide.
        best = by(Way.BEST, base)
        wider = attention / best.attention_s
        yield replace(
            best,
            configuration=replace(
                base, prefill=flags.get(True, DEFAULTS), decode=flags.get(False, DEFAULTS)
            ),
            attention_s=attention,
            low_s=best.low_s * wider,
            high_s=best.high_s * wider,
            passes_s=None if tally.rest is None else whole,
        )
    if plugin:
        yield by(Way.PLUGIN, replace(base, plugin=True))


# --- judging


def judged(found: Iterable[Ranked], default: Ranked) -> list[Ranked]:
    """The configurations, the fastest first, each with what is not sure about it."""
    every = sorted(
        found,
        key=lambda one: (float(f"{one.seconds:.4g}"), one.memory_gib, one.configuration.plugin),
    )
    return [
        replace(
            one,
            pareto=not any(_dominates(other, one) for other in every),
            unsure=tuple(_doubts(one, default)),
        )
        for one in every
    ]


_MORE = 1.001
"""Times and memory within this factor are the same."""


def _dominates(one: Ranked, other: Ranked) -> bool:
    no_worse = one.seconds <= other.seconds * _MORE and one.memory_gib <= other.memory_gib * _MORE
    better = one.seconds * _MORE < other.seconds or one.memory_gib * _MORE < other.memory_gib
    # Of two that are the same, the one without the plug-in has fewer parts.
    simpler = other.configuration.plugin and not one.configuration.plugin
    return no_worse and (better or simpler)


def _doubts(one: Ranked, default: Ranked) -> Iterator[str]:
    own, base = one.configuration, default.configuration
    if one.seconds >= default.seconds:
        yield "not faster by these estimates"
    elif one.slowest >= default.fastest:
        yield "the estimates leave room for the default"
    if one.passes_s is None and (own.chunk != base.chunk or own.graphs != base.graphs):
        yield "the number of passes and their launches are not counted; give --rest"
    if (own.tp, own.dp) != (base.tp, base.dp):
        yield "communication, and the other layers' work, are not counted"
    if own.next_n != base.next_n:
        yield "how many drafts are accepted is assumed"
    if own.kv_dtype != base.kv_dtype:
        yield "the KV format changes what the model computes"
    if one.memory_gib > one.device_gib > 0:
        yield "the cache and the requests at once need more memory than the GPU has"
    if bool(one.pass_times) != bool(default.pass_times):
        yield "only one of it and the default has measured times of whole passes"
    if set(one.unpriced) != set(default.unpriced):
        yield "not the same steps are priced"


# --- flags that are given


def parsed_flags(text: str) -> dict[str, str]:
    """Launch arguments and assignments of variables, by name.

    Raises:
        UsageError: when a quotation in `text` does not end.
    """
    found: dict[str, str] = {}
    latest = ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the flags {text!r} cannot be read: {error}") from None
    for word in words:
        name, equals, value = word.partition("=")
        if equals or name.startswith("--"):
            found[name], latest = value, "" if equals else name
        elif latest:
            found[latest], latest = word, ""
    return found


def differences(given: Mapping[str, str], wanted: Configuration) -> list[str]:
    """Lines of a diff from `given` to `wanted`: of what this advice is about, nothing else."""
    target = wanted.flags()
    if not wanted.plugin and _OFF in given:
        target[_OFF] = given[_OFF]
    about = [*_KNOWN, *(name for name in target if name not in _KNOWN)]
    lines = []
    for name in about:
        before, after = given.get(name), target.get(name)
        if before == after:
            continue
        lines += [f"-{_word(name, before)}"] if before is not None else []
        lines += [f"+{_word(name, after)}"] if after is not None else []
    return lines


_KNOWN = (
    "--kv-cache-dtype",
    "--chunked-prefill-size",
    "--disable-prefill-cuda-graph",
    PREFILL_FLAG,
    DECODE_FLAG,
    THRESHOLD,
    _OFF,
)


def _word(name: str, value: str) -> str:
    if not name.startswith("--"):
        return f"{name}={value}"
    return f"{name} {value}" if value else name
