"""What a whole pass takes: its attention by a table, and a model of everything else.

The model, whose formula docs/replay.md has, is fitted when it is made, to passes that were measured
in an engine. What it misses is interpolated between these, so that they get what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import exp, log, log2, prod
from statistics import median

from nsa_tune.backend.costmodel.least_squares import fitted_weights
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES, graph_size
from nsa_tune.reports.traffic.engine_passes import EnginePass

_ROUTED, _CHOSEN = 256, 8
"""Experts of a layer in DeepSeek V3.2 and GLM-5, and how many a token is sent to."""
_LONG = 2048
"""New tokens from which a prefill is fitted to before it is known what waits for the host."""
_HOST_BOUND = 1.2  # a prefill that takes so many times what the GPU needs waited for its host
_LAUNCHED = frozenset({PassMode.ENGINE, PassMode.TABLE_KERNEL, PassMode.EAGER})
"""Ways in which the host launches parts of each layer."""
_REACH = 0.5  # octaves within which a measured pass corrects the model
_DOUBT = 0.2  # how much the correction is drawn to none, in measured passes

Observed = tuple[EnginePass, float]
"""A measured pass, with the attention that the table prices for it."""
_Kind = tuple[PassMode, bool]  # the way of a pass, and whether it decodes
_Place = tuple[float, float, float]
"""Where a pass is among others of its kind: octaves of new tokens, context and sequences."""


class NonAttentionModel:
    """Prices whole passes of one engine."""

    def __init__(
        self, observed: Sequence[Observed], index_topk: int, scale: float = 1.0,
        indexer_share: float = 1.0, sizes: Sequence[int] = GRAPH_SIZES,
        ranks: tuple[int, int] = (1, 1), host_us: Mapping[tuple[bool, bool], float] | None = None,
    ) -> None:  # fmt: skip
        """Fit to `observed`, which ran in graphs of `sizes`. The indexer selects above `index_topk`
        keys. The priced model has `scale` times the layers of the engine that ran, of which
        `indexer_share` select keys, and SGLang's own sizes of graphs. `ranks` share the experts
        that ran, and those of the priced model. The host needs `host_us` at most, where given."""
        self._sizes, self._ranks = sizes, ranks[0]
        self._topk, self._scale, self._indexer_share = index_topk, scale, indexer_share
        self._launch_us: Mapping[tuple[bool, bool], float] = {}
        self._weights = self._fitted(
            (row, attention_us)
            for row, attention_us in observed
            if not is_launched(row.batch, row.way) or row.batch.q_tokens >= _LONG
        )
        gpu_bound, waited = [], defaultdict[tuple[bool, bool], list[float]](list)
        for row, attention_us in observed:
            gpu_us = self._modelled(row.batch, row.way, attention_us)
            if not host_us and is_launched(row.batch, row.way) and row.us > _HOST_BOUND * gpu_us:
                waited[self._kind(row.batch, row.way)].append(row.us)
            else:
                gpu_bound.append((row, attention_us))
        self._weights = self._fitted(gpu_bound)
        self._launch_us = host_us or {kind: median(times) for kind, times in waited.items()}
        self._residuals = defaultdict[_Kind, list[tuple[_Place, float]]](list)
        for row, attention_us in observed:
            modelled_us = self._modelled(row.batch, row.way, attention_us)
            kind, place = _place(row.batch, row.way)
            self._residuals[kind].append((place, log(row.us / modelled_us)))
        self._sizes, self._ranks = GRAPH_SIZES, ranks[1]
        self.ways = frozenset(row.way for row, _ in observed)
        """Ways that were measured."""
        self._correction = lru_cache(maxsize=8)(self._correction_at)

    def us(self, batch: Batch, way: PassMode, attention_us: float) -> float:
        """Microseconds of a pass in one way, in which all layers' attention takes so long."""
        modelled = self._modelled(batch, way, attention_us, self._scale, self._indexer_share)
        return modelled * self._correction(*_place(batch, way))

    def launch_us(self, batch: Batch, way: PassMode, scale: float | None = None) -> float:
        """What the host needs to launch a prefill."""
        launched = self._launch_us.get(self._kind(batch, way), 0.0)
        return is_launched(batch, way) * launched * (self._scale if scale is None else scale)

    def error(self, quantile: float = 0.75) -> float:
        """How far the model is off on measured batches, each left out in turn, as a part of their
        time. The weights are kept, as a single batch hardly moves them."""
        errors = sorted(
            abs(self._correction(kind, place, without=True) * exp(-residual) - 1)
            for kind, residuals in self._residuals.items()
            for place, residual in residuals
        )
        return errors[int(quantile * (len(errors) - 1))]

    def _fitted(self, rows: Iterable[Observed]) -> tuple[float, ...]:
        used = [(row, attention_us) for row, attention_us in rows if attention_us < row.us]
        columns = zip(
            *([x / row.us for x in self._features(row.batch, row.way)] for row, _ in used),
            strict=True,
        )
        return fitted_weights(list(columns), [1 - us / row.us for row, us in used])

    def _features(self, batch: Batch, way: PassMode) -> tuple[float, ...]:
        extend, tokens = batch.mode is Mode.EXTEND, batch.q_tokens
        if extend and way is not PassMode.EAGER:
            tokens = graph_size(tokens, self._sizes)
        selects = extend and batch.max_kv > self._topk
        experts = (1 - (1 - _CHOSEN / _ROUTED) ** (tokens * self._ranks)) / self._ranks
        return (1.0, experts, tokens, selects * batch.q_tokens, selects * batch.pairs)

    def _modelled(
        self, batch: Batch, way: PassMode, attention_us: float, scale: float = 1, share: float = 1
    ) -> float:
        features = self._features(batch, way)
        shares = (1.0, 1.0, 1.0, share, share)
        rest_us = sum(map(prod, zip(self._weights, features, shares, strict=True)))
        return max(attention_us + scale * rest_us, self.launch_us(batch, way, scale))

    def _kind(self, batch: Batch, way: PassMode) -> tuple[bool, bool]:
        """Passes that take the host the same time: (eager, selecting)."""
        return way is PassMode.EAGER, batch.max_kv > self._topk

    def _correction_at(self, kind: _Kind, place: _Place, *, without: bool = False) -> float:
        """By what the model misses nearby; `without` what was measured at `place` itself."""
        tokens, context, sequences = place
        total = weight = 0.0
        for (of_tokens, of_context, of_sequences), residual in self._residuals[kind]:
            x, y, z = tokens - of_tokens, context - of_context, sequences - of_sequences
            distance = x * x + y * y + z * z
            if distance == 0 and without:
                continue
            closeness = exp(-distance / _REACH**2)
            total += closeness * residual
            weight += closeness
        return exp(total / (weight + _DOUBT))


def is_launched(batch: Batch, way: PassMode) -> bool:
    """Whether the host launches parts of each layer."""
    return batch.mode is Mode.EXTEND and way in _LAUNCHED


def _place(batch: Batch, way: PassMode) -> tuple[_Kind, _Place]:
    kind = PassMode.ENGINE if way is PassMode.TABLE_KERNEL else way
    context = max(batch.pairs / batch.q_tokens, 1.0)
    decode = batch.mode is not Mode.EXTEND
    return (kind, decode), (log2(batch.q_tokens), log2(context) / 2, log2(batch.batch_size))
