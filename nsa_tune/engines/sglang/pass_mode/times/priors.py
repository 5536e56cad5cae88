"""Times of an engine that differs in little from this one.

A few passes tell whether they hold here: if each way takes, up to one factor, what it took there,
the rest need not be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

_MAY_DIFFER = frozenset({"sglang", "torch", "cpu", "load_format", "tp_size"})
"""Fields of the key in which a prior's may differ from this engine's. The heads are of one rank, so
what another number of ranks adds is the all-reduce, to every way."""
_SPREAD = 1.15
"""By so many times the factors of one way may differ from each other."""

Place = tuple[PassMode, int, int, bool, int]
"""Which pass it is, whatever it takes."""


def place_of(time: PassTime) -> Place:
    """Which pass was measured."""
    return time.mode, time.q_tokens, time.context, time.selects, time.padding


def prior(key: Mapping[str, object], table: str | None) -> PassTimes | None:
    """Times that may hold for an engine of this key and table: of all that fit the newest.

    Where another table chose the kernels, those of `PassMode.TABLE_KERNEL` are left out.
    """

    def fits(other: Mapping[str, object]) -> bool:
        differing = {name for name in key.keys() | other.keys() if key.get(name) != other.get(name)}
        return differing <= _MAY_DIFFER

    kept = remembered.newest(fits)
    if kept is None or not kept[1].times:
        return None
    known = kept[1]
    if known.table == table:
        return known
    times = [time for time in known.times if time.mode is not PassMode.TABLE_KERNEL]
    return PassTimes(known.key, times, table) if times else None


def of_table(times: Iterable[PassTime]) -> frozenset[Place]:
    """The passes by which a table's kernels are compared with SGLang's own, where none is known."""
    places = [place_of(time) for time in times]
    if any(place[0] is PassMode.TABLE_KERNEL for place in places):
        return frozenset()
    return frozenset(
        (PassMode.TABLE_KERNEL, *place[1:]) for place in places if place[0] is PassMode.ENGINE
    )


def anchors(times: Iterable[PassTime], off: frozenset[PassMode]) -> frozenset[Place]:
    """The passes to measure: of each way the shortest, a middle one and the longest."""
    by_mode: dict[PassMode, list[PassTime]] = {}
    for time in times:
        if time.mode not in off and not time.padding:
            by_mode.setdefault(time.mode, []).append(time)
    places = set()
    for ways in by_mode.values():
        ways.sort(key=lambda time: time.pass_us)
        places |= {place_of(ways[at]) for at in (0, len(ways) // 2, -1)}
    return frozenset(places)


def rescaled(
    known: Sequence[PassTime], measured: Sequence[PassTime], off: frozenset[PassMode]
) -> list[PassTime] | None:
    """The known times, scaled by those that were measured here; None where they do not hold.

    Ways of which no time is known have those that were measured.
    """
    here = {place_of(time): time for time in measured}
    factors: dict[PassMode, list[float]] = {}
    for time in known:
        if place_of(time) in here:
            factor = here[place_of(time)].pass_us / time.pass_us
            factors.setdefault(time.mode, []).append(factor)
    ways = {time.mode for time in known} - off
    if not ways or ways != factors.keys():
        return None
    if any(max(of) > _SPREAD * min(of) for of in factors.values()):
        return None
    scales = {mode: median(of) for mode, of in factors.items()}
    times = [
        here.get(place_of(time)) or _scaled(time, scales[time.mode])
        for time in known
        if time.mode in ways
    ]
    return times + [time for time in measured if time.mode not in {one.mode for one in known}]


def _scaled(time: PassTime, factor: float) -> PassTime:
    host_us = None if time.host_us is None else factor * time.host_us
    return replace(time, pass_us=factor * time.pass_us, host_us=host_us)
