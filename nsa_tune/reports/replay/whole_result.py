"""What a replay found of whole prefill passes, as records and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.replay.tally import SetupSum, Tally
from nsa_tune.reports.replay.whole_prefills import ENGINE, PLUGIN, Basis


@dataclass(frozen=True, slots=True)
class PassesByWay:
    """Prefills that run in one way."""

    passes: int
    seconds: float
    engine_seconds: float
    """The same passes by the engine itself."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All prefills under one setup of the engine."""

    name: str
    """"engine", "plug-in", or a flag."""
    passes: int
    """Those with a price, both under this setup and in the engine by itself."""
    seconds: float
    """They take so long."""
    engine_seconds: float
    """In the engine by itself they take so long."""
    ways: Mapping[str, PassesByWay]
    bases: Mapping[str, int]
    """Passes by what their time rests on; those that are not priced too."""

    @property
    def saved(self) -> float:
        """Part of the engine's own time."""
        return 1 - self.seconds / self.engine_seconds if self.engine_seconds else 0.0


@dataclass(frozen=True, slots=True)
class WholePasses:
    """Whole prefills of a trace, the same passes under each setup."""

    source: str
    """Where the pass times come from."""
    setups: tuple[Setup, ...]

    @property
    def static(self) -> Setup | None:
        """The setup of one flag that takes the least time; None where the defaults take less."""
        return best_static(self.setups)


def best_static(setups: Sequence[Setup]) -> Setup | None:
    """The fastest of those that are a flag, and have as many priced passes as the engine."""
    engine = next(one for one in setups if one.name == ENGINE)
    flags = [
        one
        for one in setups
        if one.name not in (ENGINE, PLUGIN) and one.passes == engine.passes > 0
    ]
    best = min(flags, key=lambda one: one.seconds, default=None)
    return None if best is None or best.seconds >= engine.seconds else best


def whole_of(tally: Tally) -> WholePasses | None:
    """What a tally has added up; None without pass times."""
    if tally.whole is None:
        return None
    setups = (_setup(name, one) for name, one in tally.setups.items())
    return WholePasses(tally.whole.source, tuple(one for one in setups if _differs(one)))


def _differs(one: Setup) -> bool:
    """Whether a flag changes something. A kernel that cannot run here has no price anywhere."""
    return one.name in (ENGINE, PLUGIN) or any(way != ENGINE for way in one.ways)


def _setup(name: str, found: SetupSum) -> Setup:
    ways = {
        way: PassesByWay(count, found.us[way] / 1e6, found.engine_us[way] / 1e6)
        for way, count in found.passes.most_common()
    }
    return Setup(
        name,
        sum(one.passes for one in ways.values()),
        sum(one.seconds for one in ways.values()),
        sum(one.engine_seconds for one in ways.values()),
        ways,
        dict(found.bases),
    )


def whole_tables(
    found: WholePasses, ttft_s: Mapping[str, Mapping[str, float]]
) -> list[DisplayTable]:
    """Prefills by setup, and by way; `ttft_s` has times to first token by setup."""
    rows = [
        (
            f"{one.name} (best flag)" if one is found.static else one.name,
            str(one.passes),
            f"{one.seconds:.2f}",
            f"{one.engine_seconds:.2f}",
            _part(one.saved, one.name == ENGINE),
            *(f"{ttft_s[one.name][name]:.3f}" if one.name in ttft_s else "" for name in _TTFT),
            str(one.bases.get(Basis.NONE, 0)),
        )
        for one in found.setups
    ]
    setups = DisplayTable(
        "Whole prefill passes",
        (
            "setup", "passes", "seconds", "the engine's own", "saved", "TTFT mean s", "p50", "p90",
            "not priced",
        ),
        tuple(rows),
        frozenset(range(1, 9)),
        "Host and GPU together, of the passes that have a price. Each setup's times to first token "
        "are those of its own replay.",
    )  # fmt: skip
    return [setups, _by_way(found)]


_TTFT = ("mean", "p50", "p90")


def _by_way(found: WholePasses) -> DisplayTable:
    return DisplayTable(
        "Whole prefill passes by the way that they run",
        ("setup", "way", "passes", "of them", "seconds", "of them", "the engine's own", "saved"),
        tuple(row for one in found.setups if one.name in (ENGINE, PLUGIN) for row in _ways(one)),
        frozenset(range(2, 8)),
    )


def _ways(setup: Setup) -> Iterator[tuple[str, ...]]:
    for way, one in setup.ways.items():
        saved = 1 - one.seconds / one.engine_seconds if one.engine_seconds else 0.0
        yield (
            setup.name, way, str(one.passes), f"{one.passes / setup.passes:.1%}",
            f"{one.seconds:.2f}", f"{one.seconds / setup.seconds:.1%}" if setup.seconds else "-",
            f"{one.engine_seconds:.2f}", _part(saved, setup.name == ENGINE),
        )  # fmt: skip


def _part(saved: float, nothing: bool) -> str:
    return "-" if nothing else f"{round(saved, 3) + 0.0:.1%}"
