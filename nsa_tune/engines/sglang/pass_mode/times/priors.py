"""Times of an engine that differs in little from this one.

A few passes tell whether they hold here: if each way takes, up to one factor, what it took there,
the rest need not be measured. Passes that wait for the host have a factor of their own, the same in
all ways: another host, or a busier one, says nothing of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

_MAY_DIFFER = frozenset({
    "sglang", "torch", "plug_in", "cpu", "load_format", "tp_size", "whole_pass_sizes"
})  # fmt: skip
"""Fields of the key in which a prior's may differ from this engine's. The heads are of one rank, so
what another number of ranks adds is the all-reduce, to every way. Of whole-pass graphs few are
timed, and between them times are interpolated."""
_SIZES = frozenset({"prefill_sizes", "decode_sizes"})
"""A graph takes the same whichever others there are. What was not timed there is timed here."""
_DRAFTS = "draft_tokens"
"""Says something of decode graphs only. With drafts passes return hidden states besides."""
_USUAL = (PassMode.ENGINE, PassMode.TABLE_KERNEL, PassMode.EAGER)
_SPREAD, _HOST_SPREAD = 1.15, 2.0
"""By so many times the factors of one way, and those of the host, may differ from each other: in
one start the same launches took 130 ms and 193."""
_UNHINDERED = 2.0
"""A pass that takes so many times its launches does not wait for a slower host either."""

Place = tuple[PassMode, int, int, bool, int]
"""Which pass it is, whatever it takes."""


def place_of(time: PassTime) -> Place:
    """Which pass was measured."""
    return time.mode, time.q_tokens, time.context, time.selects, time.padding


def prior(key: Mapping[str, Any]) -> PassTimes | None:
    """Times that may hold for an engine of this key: of all that fit the newest.

    Passes of which they cannot tell are left out: those of sizes that it has no graphs of, and
    decode graphs where these verify drafts.
    """

    def within(may: frozenset[str]) -> Callable[[Mapping[str, object]], bool]:
        return lambda other: all(key.get(at) == other.get(at) for at in {*key, *other} - may)

    sizes = _MAY_DIFFER | _SIZES
    none: frozenset[str] = frozenset()
    more = (none, _MAY_DIFFER, sizes, sizes | {_DRAFTS})
    kept = remembered.newest(*map(within, more))
    if kept is None:
        return None
    known = kept[1]
    usual = dict.fromkeys(_USUAL, key["prefill_sizes"])
    graphs = {**usual, PassMode.DECODE_GRAPH: key["decode_sizes"], **key["whole_pass_sizes"]}
    if known.key.get(_DRAFTS) != key.get(_DRAFTS):
        del graphs[PassMode.DECODE_GRAPH]
    times = [time for time in known.times if time.q_tokens in graphs.get(time.mode, ())]
    return PassTimes(known.key, times, known.table, kernels=known.kernels) if times else None


def kernel_place(time: PassTime) -> str:
    """Under which the table's kernel for a pass is noted."""
    return f"{time.q_tokens}/{time.context}/{time.selects:d}/{time.padding}"


def chosen_alike(known: PassTimes, kernels: Mapping[str, str]) -> list[PassTime]:
    """The known times, of the table's kernels only those that are chosen here, too."""
    return [
        time
        for time in known.times
        if time.mode is not PassMode.TABLE_KERNEL
        or known.kernels.get(kernel_place(time)) == kernels.get(kernel_place(time), "")
    ]


def missing(
    known: PassTimes, wanted: Iterable[PassTime], kernels: Mapping[str, str]
) -> frozenset[Place]:
    """Of the passes to measure those of which no time is known."""
    there = {place_of(time) for time in chosen_alike(known, kernels)}
    # Where the table's kernel is SGLang's own, it was not timed.
    there |= {
        place_of(time)
        for time in wanted
        if time.mode is PassMode.TABLE_KERNEL
        and known.kernels.get(kernel_place(time)) == kernels[kernel_place(time)]
    }
    return frozenset(map(place_of, wanted)) - there


def anchors(times: Iterable[PassTime]) -> frozenset[Place]:
    """The passes that tell whether times hold: two of each way, the shortest and a middle one of
    those that hardly wait for any host, and three that do."""
    groups: dict[_Group, list[PassTime]] = {}
    for time in times:
        if not time.padding:
            groups.setdefault(_group(time), []).append(time)
    places = set()
    for group, passes in groups.items():
        clear = [one for one in passes if one.pass_us >= _UNHINDERED * (one.host_us or 0.0)]
        # Elsewhere a slower host may hold up those that hardly wait here.
        passes.sort(key=lambda time: (time.host_us or 0.0) / time.pass_us)
        chosen = sorted(clear or passes[: 2 if group else None], key=lambda time: time.pass_us)
        third = len(chosen) // 3
        at = (0, len(chosen) // 2) if group else (0, third, 2 * third)
        places |= {place_of(chosen[i]) for i in at}
    return frozenset(places)


def rescaled(known: Sequence[PassTime], measured: Sequence[PassTime]) -> list[PassTime] | None:
    """The known times, scaled by those that were measured here; None where they do not hold.

    Passes of which no time is known have those that were measured.
    """
    here = {place_of(time): time for time in measured}
    factors: dict[_Group, list[float]] = {}
    for time in known:
        if place_of(time) in here:
            factor = here[place_of(time)].pass_us / time.pass_us
            factors.setdefault(_group(time), []).append(factor)
    if not known or {_group(time) for time in known} != factors.keys():
        return None
    if any(max(of) > (_SPREAD if at else _HOST_SPREAD) * min(of) for at, of in factors.items()):
        return None
    scales = {group: median(of) for group, of in factors.items()}
    # One measured launch may be half off, and would stand out among those that are scaled.
    exact = {place: time for place, time in here.items() if not time.waits}
    times = [exact.get(place_of(time)) or _scaled(time, scales) for time in known]
    places = set(map(place_of, known))
    return times + [time for place, time in here.items() if place not in places]


_Group = PassMode | None
"""Whose factor a pass has: its way's, or the host's (None)."""


def _group(time: PassTime) -> _Group:
    return None if time.waits else time.mode


def _scaled(time: PassTime, scales: Mapping[_Group, float]) -> PassTime:
    scale = scales[_group(time)]
    host_us = None if time.host_us is None else scales.get(None, scale) * time.host_us
    # On a slower host a pass may wait that did not.
    return replace(time, pass_us=max(scale * time.pass_us, host_us or 0.0), host_us=host_us)
