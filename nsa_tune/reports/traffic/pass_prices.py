"""Prices of whole passes under each setup of the engine, shared by passes that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log2
from statistics import median
from types import MappingProxyType

from nsa_tune.autotune.workload.simulation import Pass
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES, Choice, graph_size
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN, Answers, Attention, AttentionPrices
from nsa_tune.reports.traffic.engine_passes import EnginePass, EnginePasses, shipped_passes
from nsa_tune.reports.traffic.pass_model import NonAttentionModel, is_launched

_MOST_ROWS = 512  # rows of the largest decode graph: SGLang's default on GPUs of 90 GB and more
_QUEUED_LAYERS = 34  # that wait for the GPU at most, as CUDA queues 1024 launches: 31 to 38
_FEWEST = 8
_CELLS = 8  # passes share a price if their tokens and pairs lie in the same eighth of an octave


@dataclass(slots=True)
class PassPrice:
    """One pass."""

    batch: Batch
    us: Mapping[str, float]
    """By setup; infinite where a setup cannot run it. Attention alone without a model of passes."""
    way: str  # how the plug-in runs it
    launch_us: tuple[float, float] = (0.0, 0.0)
    """What the host needs to launch it, without and with the plug-in."""
    count: int = 0


class PassPrices:
    """Prices whole passes by one table and the passes measured in an engine."""

    def __init__(
        self, attention: AttentionPrices, measured: EnginePasses | None, *,
        graph_tokens: int = GRAPH_SIZES[-1], given: Answers = MappingProxyType({}),
        between_s: float = 0.0, ranks: int = 1,
    ) -> None:  # fmt: skip
        """Prices of passes of an engine whose flags answer `given`, and in which prefills of up to
        `graph_tokens` new tokens run as graphs, `between_s` apart, on one of `ranks` that share
        experts; of attention alone without `measured`. UsageError as `AttentionPrices.check`."""
        attention.check(given)
        self.attention, self.measured = attention, measured
        self.graph_tokens, self.given, self.between_s = graph_tokens, given, between_s
        setting = attention.setting
        self.topk = setting.profile.index_topk
        self.unqueued = max(1 - _QUEUED_LAYERS / setting.sharing, 0.0)
        self._choice = Choice(GRAPH_SIZES, self.topk, {}, ())
        self.setups = attention.setups
        self.model: NonAttentionModel | None = None
        if measured is not None:
            # Attention is priced for the model's layers; the engine may have had fewer.
            share = measured.layers / setting.sharing
            observed = [
                (row, us * share)
                for row in measured.passes
                if (us := self._attention_us(row)) is not None and us < inf
            ]
            if len(observed) >= _FEWEST:
                self.model = NonAttentionModel(
                    observed, self.topk, 1 / share, attention.indexer_share, measured.graph_sizes,
                    (measured.key.get("ep", 1), ranks), _host_us(measured, self.topk, share),
                )  # fmt: skip

    def _attention_us(self, row: EnginePass) -> float | None:
        """All layers' attention of a measured pass in the way that it ran."""
        attention = self.attention.of(row.batch, graph=row.way is not PassMode.EAGER)
        usual = attention.us.get(row.setup)
        return None if usual is None else self._way_us(row.batch, row.way, attention, usual)

    def _way_us(self, batch: Batch, way: PassMode, priced: Attention, usual: float) -> float | None:
        """The same of any pass; `usual` in a way that changes nothing about attention."""
        if way is PassMode.DENSE_GRAPH:
            return priced.dense_us
        if way is PassMode.DENSE_MLA_GRAPH:
            return min(priced.us[DEFAULT], priced.dense_us or inf)
        if way is PassMode.DECODE_GRAPH:
            context = max(round(batch.pairs / batch.q_tokens), 1)
            rows = Batch.decode([context] * batch.q_tokens)
            return self.attention.of(rows.sums, graph=True).us[DEFAULT]
        return usual

    def of(self, batch: Batch, setups: Sequence[str] = ()) -> PassPrice:
        """What `batch` takes under `setups`, the default one among them, else under all."""
        extend = batch.mode is Mode.EXTEND
        graph = not extend or batch.q_tokens <= self.graph_tokens
        attention = self.attention.of(batch, graph=graph, given=self.given, setups=setups)
        if self.model is None:
            return PassPrice(batch, attention.us, PassMode.ENGINE)
        way = PassMode.ENGINE if not extend or (graph and _padded(batch)) else PassMode.EAGER
        us = {setup: self.model.us(batch, way, taken) for setup, taken in attention.us.items()}
        steers = extend and graph and PLUGIN in us
        steered = self._steered(batch, us, attention) if steers else way
        launches = self.model.launch_us(batch, way), self.model.launch_us(batch, steered)
        return PassPrice(batch, us, steered, launches)

    def _steered(self, batch: Batch, us: dict[str, float], attention: Attention) -> PassMode:
        """The plug-in's choice of a way; `us` gets what it takes."""
        assert self.model is not None
        ways = {PassMode.ENGINE: us[DEFAULT]}
        if us[PLUGIN] < us[DEFAULT]:  # another kernel, or its copies in less time
            ways[PassMode.TABLE_KERNEL] = us[PLUGIN]
        for way in self._other_ways(batch):
            attention_us = self._way_us(batch, way, attention, attention.us[PLUGIN])
            if attention_us is not None and attention_us < inf:
                ways[way] = self.model.us(batch, way, attention_us)
        taken = self._choice.of(ways, None, batch)
        us[PLUGIN] = ways.get(taken, us[DEFAULT])
        return taken

    def _other_ways(self, batch: Batch) -> Iterable[PassMode]:
        dense = batch.max_kv <= self.topk and _padded(batch)
        runs = {
            PassMode.DENSE_GRAPH: dense and not batch.prefix_tokens,
            PassMode.DENSE_MLA_GRAPH: dense,
            PassMode.SPARSE_GRAPH: batch.max_kv > self.topk and _padded(batch),
            PassMode.DECODE_GRAPH: batch.q_tokens <= _MOST_ROWS,
        }
        return (way for way in runs if runs[way] and self.model and way in self.model.ways)


def _host_us(measured: EnginePasses, topk: int, share: float) -> dict[tuple[bool, bool], float]:
    """What the host needs, (eager, selecting): the median of the least that engines of more layers
    took. Nothing where most layers ran: those of few take long for other reasons than waiting."""
    least = defaultdict[tuple[bool, bool], dict[int, float]](dict)
    for number, passes in enumerate(shipped_passes() if 2 * share <= 1 else ()):
        alike = all(passes.key[name] == measured.key[name] for name in ("gpu", "model"))
        rows = passes.passes if alike and passes.layers > measured.layers else ()
        for row in sorted(rows, key=lambda row: -row.us):
            if is_launched(row.batch, row.way):
                kind = row.way is PassMode.EAGER, row.batch.max_kv > topk
                least[kind][number] = row.us * measured.layers / passes.layers
    return {kind: median(of.values()) for kind, of in least.items()}


def _padded(batch: Batch) -> bool:
    """Whether a captured graph is small enough for a prefill."""
    return graph_size(batch.q_tokens) > batch.q_tokens or batch.q_tokens in GRAPH_SIZES


@dataclass(slots=True)
class PriceList:
    """Prices that passes which are alike share: those of the first of each shape."""

    prices: PassPrices
    shapes: dict[tuple[object, ...], PassPrice] = field(default_factory=dict)
    setups: Sequence[str] = ()
    """Those under which what is not in `shapes` yet is priced, with the default; else all."""

    def of(self, forward: Pass) -> PassPrice:
        """The shape of a simulated pass."""
        return self._shape(forward.is_extend, forward.sums, forward.batch)

    def of_batch(self, batch: Batch) -> PassPrice:
        """The shape of a batch that ran."""
        sums = (batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs)
        return self._shape(batch.mode is Mode.EXTEND, sums, lambda: batch)

    def _shape(self, extend: bool, sums: tuple[int, ...], batch: Callable[[], Batch]) -> PassPrice:
        """`batch` is called for the first pass of a shape."""
        key = _alike(extend, sums, self.prices.topk)
        shape = self.shapes.get(key)
        if shape is None:
            # A decode's many lengths hardly matter beside their sums, and take long to look at.
            first = batch() if extend else batch().sums
            shape = self.shapes[key] = self.prices.of(first, self.setups)
        return shape


def _alike(extend: bool, sums: tuple[int, ...], topk: int) -> tuple[object, ...]:
    """What passes that are alike have in common."""
    size, new, kv, longest, pairs = sums
    few = size if size <= 4 else int(_CELLS / 2 * log2(size)) + 4
    if not extend:
        return few, new // size, int(_CELLS * log2(kv))
    # What fits into another graph takes another time.
    graph, context = graph_size(new), int(_CELLS * log2(pairs / new + 1))
    return few, graph, int(_CELLS * log2(new)), context, longest > topk, kv == new
