"""Tally: the prices of millions of passes, added up in little memory.

Passes that are alike share one price: that of the first of them. Alike are passes of one kind with
the same number of sequences, whose new tokens, kv tokens and pairs lie in the same sixteenth of an
octave. After 5000 such shapes, those that are new share a price with the ones in the same quarter
of an octave. A random sample of the passes is priced one by one at the end, and tells how far the
shared prices are off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log2
from random import Random
from statistics import median

from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.replay.flags import PREFILL_FLAG, Flags
from nsa_tune.reports.replay.prices import Price, Pricer, Way
from nsa_tune.reports.replay.rest import RestOfPass, kind_of
from nsa_tune.reports.replay.whole_prefills import EAGER, ENGINE, PLUGIN, Basis, Took, WholePrefills

Sums = tuple[int, int, int, int, int]
"""Of a pass: sequences, new tokens, kv tokens, kv tokens of the longest, (query, key) pairs."""

_Key = tuple[int, int, int, int, int, int, int]
"""Cells an octave, kind of pass, and the cells of the longest sequence, sequences, new tokens, kv
tokens and pairs."""

_CELLS = 16
"""Cells an octave, for tokens and pairs."""
_COARSE = 4
"""Cells an octave for passes of rare shapes."""
_LONGEST = 2
"""Cells an octave for the longest sequence, above index_topk."""
_MOST_FINE = 5_000
"""Shapes after which new ones count as rare."""
_MOST_CELLS = 20_000
_FEW = 8
"""Up to so many sequences only equal numbers are alike."""
_SAMPLE = 200
_NOTHING = 1e-4
"""Part of the time that is not worth a flag."""


@dataclass(slots=True)
class _Cell:
    """Passes that are alike."""

    batch: Batch
    price: Price
    graph: bool
    sums: Sums
    took: dict[str, Took] = field(default_factory=dict)
    """By setup: what the whole pass takes. Empty without pass times."""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """Passes of one shape, by what the engine loses on them."""

    extend: bool
    passes: int
    sequences: tuple[int, int]
    """The fewest and the most, as far as the passes whose price is shared tell."""
    new_tokens: tuple[int, int]
    kv_tokens: tuple[int, int]
    engine_us: float
    """All of them, as the engine chooses."""
    table_us: float
    example: str
    """One of their batches."""
    engine_arms: str
    table_arms: str

    @property
    def lost_us(self) -> float:
        """What the table would save."""
        return self.engine_us - self.table_us


@dataclass(frozen=True, slots=True)
class SharedPrices:
    """How far shared prices are off: of a sample, shared over own price, minus one."""

    passes: int
    median: float
    """Of the sizes of the errors."""
    p90: float
    total: float
    """Of the sum."""


@dataclass(slots=True)
class SetupSum:
    """Prefills under one setup of the engine."""

    passes: Counter[str] = field(default_factory=Counter)
    """By the way that they run."""
    us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The same, microseconds."""
    engine_us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The same passes by the engine itself."""
    bases: Counter[str] = field(default_factory=Counter)
    """Passes by what their time rests on."""

    def add(self, took: Took, engine: Took, count: int) -> None:
        """Add `count` such passes. One without a price is only counted."""
        self.bases[took.basis] += count
        if Basis.NONE not in (took.basis, engine.basis):
            self.passes[took.way] += count
            self.us[took.way] += count * took.us
            self.engine_us[took.way] += count * engine.us


@dataclass(slots=True)
class _Kind:
    """Everything about extends, or about the other passes."""

    passes: int = 0
    new_tokens: int = 0
    unpriced: Counter[str] = field(default_factory=Counter)
    """Passes by the step that has no price."""
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    """By point and way: microseconds, their low and high ends, and what is extrapolated."""
    gains_us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    static_us: list[float] = field(default_factory=list)
    whole_ms: dict[Way, float] = field(default_factory=lambda: dict.fromkeys(Way, 0.0))
    """Whole passes, by way; 0 without a model of the rest."""
    static_ms: list[float] = field(default_factory=list)
    """Whole passes under each of the flags."""


class Tally:
    """Adds up passes of one configuration."""

    def __init__(
        self,
        pricer: Pricer,
        graph_tokens: int,
        rest: RestOfPass | None = None,
        *,
        whole: WholePrefills | None = None,
        seed: int = 0,
    ) -> None:
        """Prefills of up to `graph_tokens` new tokens run as CUDA graphs; decode always does.

        With `whole`, whole prefills are added up too.
        """
        self.pricer = pricer
        self.rest = rest
        self.whole = whole
        self.setups: dict[str, SetupSum] = {
            name: SetupSum() for name in (whole.setups if whole is not None else ())
        }
        """Whole prefills, by setup."""
        self.graph_tokens = graph_tokens
        self._topk = pricer.setting.profile.index_topk
        self._cells: dict[_Key, _Cell] = {}
        self._latest: tuple[Sums | None, _Cell | None] = None, None
        """Who asks for the time of a pass adds the pass next."""
        self._graph_sizes = whole.choice.sizes if whole is not None else ()
        self.kinds = {extend: _Kind() for extend in (True, False)}
        self._lost: dict[tuple[bool, int, int, int, str, str], _LostSum] = {}
        self._sample = {extend: _Sample(Random(seed)) for extend in (True, False)}

    def graph(self, extend: bool, sums: Sums) -> bool:
        """Whether such a pass runs as a CUDA graph."""
        return not extend or sums[1] <= self.graph_tokens

    def padding(self, extend: bool, sums: Sums) -> int:
        """Tokens of the graph of such a pass that are not new, where its sizes are known."""
        if self.whole is None or not extend or not self.graph(extend, sums):
            return 0
        return self.whole.padding(sums[1])

    def price(self, extend: bool, sums: Sums, batch: Callable[[], Batch]) -> Price:
        """The price that a pass shares; `batch` is asked for the first of its kind only."""
        return self._cell(extend, sums, batch).price

    def took(self, sums: Sums, batch: Callable[[], Batch]) -> dict[str, Took]:
        """What a whole prefill takes under each setup, as passes that are alike share it."""
        return self._cell(True, sums, batch).took

    def add(self, extend: bool, sums: Sums, batch: Callable[[], Batch], count: int = 1) -> None:
        """Add `count` such passes."""
        cell = self._cell(extend, sums, batch)
        cell.count += count
        kind = self.kinds[extend]
        kind.passes += count
        kind.new_tokens += count * sums[1]
        sample = self._sample[extend]
        slot = sample.slot()
        if slot is not None:
            sample.kept[slot] = (batch(), cell)

    def _cell(self, extend: bool, sums: Sums, batch: Callable[[], Batch]) -> _Cell:
        asked, latest = self._latest
        if latest is not None and asked is sums:
            return latest
        cells, key = self._cells, self._key(extend, sums)
        cell = cells.get(key)
        if cell is None and len(cells) >= _MOST_FINE:
            key = _coarse(key, sums[0])
            cell = cells.get(key)
        if cell is None:
            cell = self._priced(key, extend, sums, batch())
        self._latest = sums, cell
        return cell

    def _priced(self, key: _Key, extend: bool, sums: Sums, batch: Batch) -> _Cell:
        """A new cell, with the price of its first pass."""
        if len(self._cells) >= _MOST_CELLS:
            self.done()
            self._cells.clear()
        graph = self.graph(extend, sums)
        price = self.pricer.price(batch, graph=graph)
        cell = self._cells[key] = _Cell(batch, price, graph, sums)
        if extend and self.whole is not None:
            cell.took = self.whole.took(batch, price, graph=graph)
        return cell

    def _key(self, extend: bool, sums: Sums) -> _Key:
        """What passes that are alike have in common."""
        size, new, kv, longest, pairs = sums
        topk = self._topk
        within = longest <= topk
        most = longest * 2 * _FEW // topk if within else -int(_LONGEST * log2(longest))
        kind = (2 if extend else 0) + (not extend or new <= self.graph_tokens)
        if extend:
            # Graphs have sizes: what fits into another one takes another time.
            kind += 4 * bisect_left(self._graph_sizes, new)
        return (
            _CELLS,
            kind,
            most,
            size if size <= _FEW else int(_CELLS * log2(size)) + _FEW,
            int(_CELLS * log2(new)),
            int(_CELLS * log2(kv)),
            # In a decode the pairs follow from the rest.
            int(_CELLS * log2(pairs)) if extend else 0,
        )

    # --- sums

    def done(self) -> None:
        """Add up what was added so far. Prices are kept: they serve other replays of the trace."""
        for cell in self._cells.values():
            if cell.count:
                self._fold_cell(cell)
                cell.count = 0

    def _fold_cell(self, cell: _Cell) -> None:
        extend, count, price = self._extends(cell), cell.count, cell.price
        kind = self.kinds[extend]
        for name in price.unpriced:
            kind.unpriced[name] += count
        for step in price.steps:
            rows = kind.steps.setdefault(step.point, [[0.0] * 4 for _ in Way])
            for row, one in zip(rows, step.times, strict=True):
                row[0] += count * one.latency_us
                row[1] += count * one.low_us
                row[2] += count * one.high_us
                row[3] += count * one.latency_us * one.extrapolated
            for question, gain in step.gains_us.items():
                kind.gains_us[question] += count * gain
        if not kind.static_us:
            kind.static_us = [0.0] * len(price.static)
        kind.static_us = [
            one + count * more for one, more in zip(kind.static_us, price.static, strict=True)
        ]
        if self.rest is not None:
            self._fold_whole(cell, kind, self.rest, extend)
        for setup, took in cell.took.items():
            self.setups[setup].add(took, cell.took[ENGINE], count)
        self._fold_lost(cell, extend)

    def _fold_whole(self, cell: _Cell, kind: _Kind, rest: RestOfPass, extend: bool) -> None:
        """Add what whole passes take."""
        price, name = cell.price, kind_of(extend=extend, graph=cell.graph)
        padding = self.padding(extend, cell.sums)
        # Without prefill graphs the plug-in has no other ways either.
        own, steered = (ENGINE, PLUGIN) if self.graph_tokens else (EAGER, EAGER)
        setups = {Way.ENGINE: own, Way.PLUGIN: steered}
        for way in Way:
            ms = rest.ms(name, price.total_us(way) / 1e3, cell.sums, padding=padding)
            kind.whole_ms[way] += cell.count * _measured_ms(cell.took, setups.get(way, ""), ms)
        static = [rest.ms(name, one / 1e3, cell.sums, padding=padding) for one in price.static]
        if cell.took:
            static = [*self._measured_static(cell, static)]
        kind.static_ms = [
            one + cell.count * more
            for one, more in zip(kind.static_ms or [0.0] * len(static), static, strict=True)
        ]

    def _measured_static(self, cell: _Cell, static: Sequence[float]) -> Iterator[float]:
        """Milliseconds under each of the flags: `static`, or what was measured."""
        own = static[0]  # the defaults come first
        eager = _measured_ms(cell.took, EAGER, own)
        for flags, ms in zip(self.pricer.flags[True], static, strict=True):
            if cell.graph:
                yield _measured_ms(cell.took, _setup(flags), ms)
            else:
                # A pass that waits for its launches gains nothing by another kernel.
                yield eager + max(ms - own, 0.0) if eager != own else ms

    def _fold_lost(self, cell: _Cell, extend: bool) -> None:
        engine = ", ".join(step.arms[0] for step in cell.price.steps if _differ(step.arms))
        table = ", ".join(step.arms[2] for step in cell.price.steps if _differ(step.arms))
        size, new, kv, *_ = cell.sums
        key = (extend, size.bit_length(), new.bit_length(), kv.bit_length(), engine, table)
        lost = self._lost.setdefault(key, _LostSum())
        lost.count += cell.count
        lost.engine_us += cell.count * cell.price.total_us(Way.ENGINE)
        lost.table_us += cell.count * cell.price.total_us(Way.TABLE)
        lost.low = tuple(map(min, lost.low or cell.sums, cell.sums))
        lost.high = tuple(map(max, lost.high or cell.sums, cell.sums))
        if cell.count > lost.most:
            lost.most, lost.example = cell.count, cell.batch

    @staticmethod
    def _extends(cell: _Cell) -> bool:
        return str(cell.batch.mode) == "extend"

    def total(self, extend: bool, way: Way) -> Estimate:
        """Attention of all extends, or of all other passes, in microseconds; its ends are as if
        every estimate erred to the same side."""
        number = list(Way).index(way)
        rows = [ways[number] for ways in self.kinds[extend].steps.values()]
        total, low, high, outside = (sum(row[i] for row in rows) for i in range(4))
        return Estimate(total, low, high, outside > 0)

    def static(self, extend: bool) -> tuple[Flags, float] | None:
        """The flags with the least time for extends, or for the other passes, and the microseconds
        of attention under them."""
        kind = self.kinds[extend]
        best = _least(kind.static_ms if self.rest is not None else kind.static_us)
        if best is None:
            return None
        return self.pricer.flags[extend][best], kind.static_us[best]

    def static_ms(self, extend: bool) -> float | None:
        """Whole passes under the best flags."""
        times = self.kinds[extend].static_ms
        best = _least(times)
        return None if best is None else times[best]

    def most_lost(self, count: int) -> list[Lost]:
        """The shapes on which the engine loses most, the worst first."""
        found = [_lost(key, one) for key, one in self._lost.items()]
        found = [one for one in found if one.lost_us > 0]
        return sorted(found, key=lambda one: (-one.lost_us, one.example))[:count]

    def shared_prices(self) -> dict[bool, SharedPrices]:
        """How far shared prices are off, for extends and for the other passes."""
        return {
            extend: found
            for extend, sample in self._sample.items()
            if (found := self._compared(sample)) is not None
        }

    def _compared(self, sample: _Sample) -> SharedPrices | None:
        pairs = [
            (cell.price.total_us(Way.ENGINE), self._own(batch, cell))
            for batch, cell in sample.kept.values()
        ]
        pairs = [(shared, own) for shared, own in pairs if own > 0]
        if not pairs:
            return None
        errors = sorted(abs(shared / own - 1) for shared, own in pairs)
        total = sum(shared for shared, _ in pairs) / sum(own for _, own in pairs) - 1
        return SharedPrices(len(pairs), median(errors), errors[int(0.9 * (len(errors) - 1))], total)

    def _own(self, batch: Batch, cell: _Cell) -> float:
        return self.pricer.price(batch, graph=cell.graph).total_us(Way.ENGINE)


def _setup(flags: Flags) -> str:
    """The setup of an engine with flags for its kernels, in a graph, where there is no MHA."""
    return ENGINE if flags.kernel is None else f"{PREFILL_FLAG} {flags.kernel}"


def _measured_ms(took: Mapping[str, Took], setup: str, otherwise: float) -> float:
    """Milliseconds of a pass under a setup, by times of passes where there are some."""
    one = took.get(setup)
    return otherwise if one is None or one.basis in (Basis.NONE, Basis.REST) else one.us / 1e3


def _coarse(key: _Key, size: int) -> _Key:
    """The same for rare shapes, whose cells hold several of the others."""
    _, kind, most, _, new, kv, pairs = key
    some, finer = size if size <= _FEW else int(_COARSE * log2(size)) + _FEW, _CELLS // _COARSE
    return _COARSE, kind, most, some, new // finer, kv // finer, pairs // finer


def _least(times: Sequence[float]) -> int | None:
    """Where the least of `times` is; None where none is finite. The first, and so the default, also
    stands for those that gain nothing worth a flag."""
    if not times or min(times) == inf:
        return None
    least = min(times)
    return next(i for i, time in enumerate(times) if time <= least * (1 + _NOTHING))


@dataclass(slots=True)
class _LostSum:
    count: int = 0
    engine_us: float = 0.0
    table_us: float = 0.0
    most: int = 0
    example: Batch | None = None
    low: tuple[int, ...] = ()
    """The least of each of the sums."""
    high: tuple[int, ...] = ()


def _lost(key: tuple[bool, int, int, int, str, str], one: _LostSum) -> Lost:
    extend, *_, engine, table = key
    size, new, kv, *_ = zip(one.low, one.high, strict=True)
    return Lost(
        extend, one.count, size, new, kv, one.engine_us, one.table_us, str(one.example), engine,
        table,
    )  # fmt: skip


def _differ(arms: tuple[str, ...]) -> bool:
    return arms[0] != arms[2]


class _Sample:
    """A uniform sample of a stream of unknown length (Vitter's algorithm R)."""

    def __init__(self, random: Random) -> None:
        self.kept: dict[int, tuple[Batch, _Cell]] = {}
        self._random, self._seen = random, 0

    def slot(self) -> int | None:
        """The index at which to keep the next one; None to skip it."""
        self._seen += 1
        if self._seen <= _SAMPLE:
            return self._seen - 1
        slot = int(self._random.random() * self._seen)
        return slot if slot < _SAMPLE else None

    def __iter__(self) -> Iterator[tuple[Batch, _Cell]]:
        return iter(self.kept.values())
