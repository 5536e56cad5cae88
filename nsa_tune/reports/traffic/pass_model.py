"""What a whole pass takes: its attention by a table, and a model of everything else.

The model is fitted, when it is made, to passes that were measured in an engine. Beside attention a
pass takes

    a + b * experts(tokens) + c * tokens + d * selecting tokens + e * selecting pairs

where `experts` is the share of a layer's experts that so many tokens are sent to, whose weights
must be read, and `tokens` counts a graph's padding. `d` and `e` are for new tokens, and their keys,
of passes in which the indexer selects. Prefills that SGLang launches piece by piece take no less
than their host needs. What the model misses is interpolated between the measured passes, so that a
measured pass gets what was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from statistics import median
from typing import NamedTuple

from nsa_tune.backend.costmodel.least_squares import fitted_weights
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.reports.traffic.engine_passes import EnginePass

GRAPH_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""New tokens for which prefill graphs are captured in the engines that were measured."""
MOST_PADDING = 2
"""SGLang runs a prefill eagerly where a graph would have more than so many times its tokens."""
_ROUTED, _CHOSEN = 256, 8
"""Experts of a layer in DeepSeek V3.2 and GLM-5, and how many a token is sent to."""
_HOST_BOUND = 1.2
"""A prefill that takes so many times what the GPU needs waited for its host."""
_LAUNCHED = frozenset({PassMode.ENGINE, PassMode.TABLE_KERNEL, PassMode.EAGER})
"""Ways in which the host launches parts of each layer."""
_REACH = 0.5
"""Octaves within which a measured pass corrects the model."""
_DOUBT = 0.2
"""How much the correction is drawn to none, in measured passes."""


class Observed(NamedTuple):
    """A measured pass, with the attention that the table prices for it."""

    measured: EnginePass
    attention_us: float


@dataclass(frozen=True, slots=True)
class PassError:
    """How far the model is off on measured batches, each left out in turn; parts of their time."""

    passes: int
    median: float
    p90: float


class NonAttentionModel:
    """Prices whole passes of one engine."""

    def __init__(self, observed: Sequence[Observed], index_topk: int, scale: float = 1.0) -> None:
        """Fit to `observed`; `scale` is the model's layers over those of the engine that ran."""
        self._topk, self._scale = index_topk, scale
        self._observed = observed
        gpu = [one for one in observed if one.measured.way not in _LAUNCHED]
        large = [one for one in observed if one.measured.batch.q_tokens >= GRAPH_SIZES[-3]]
        decode = [one for one in observed if one.measured.batch.mode is not Mode.EXTEND]
        self._launch_us: dict[tuple[bool, bool], float] = {}
        self._weights = self._fitted([*gpu, *large, *decode])
        waiting = [one for one in observed if self._waits(one)]
        self._weights = self._fitted([one for one in observed if not self._waits(one)])
        for kind in {self._kind(one.measured) for one in waiting}:
            times = (one.measured.us for one in waiting if self._kind(one.measured) == kind)
            self._launch_us[kind] = median(times)
        self._residuals = [(self._place(one.measured), self._residual(one)) for one in observed]
        self.ways = frozenset(one.measured.way for one in observed)
        """Ways that were measured."""

    def us(self, batch: Batch, way: PassMode, attention_us: float) -> float:
        """Microseconds of a pass.

        Args:
            batch: the pass.
            way: how it runs.
            attention_us: all layers' attention in this way.
        """
        correction = self._correction(self._place_of(batch, way))
        return correction * self._modelled(batch, way, attention_us, self._scale)

    def error(self) -> PassError:
        """Leave-one-out errors; the weights are kept, as a single batch hardly moves them."""
        errors = sorted(
            abs(self._correction(place, without=place[1:]) * exp(-residual) - 1)
            for place, residual in self._residuals
        )
        return PassError(len(errors), median(errors), errors[int(0.9 * (len(errors) - 1))])

    def _fitted(self, rows: Iterable[Observed]) -> tuple[float, ...]:
        used = [one for one in rows if one.attention_us < one.measured.us]
        rows_of = [
            [x / one.measured.us for x in self._features(one.measured.batch, one.measured.way)]
            for one in used
        ]
        columns = list(zip(*rows_of, strict=True))
        return fitted_weights(columns, [1 - one.attention_us / one.measured.us for one in used])

    def _features(self, batch: Batch, way: PassMode) -> tuple[float, ...]:
        extend = batch.mode is Mode.EXTEND
        tokens = (
            graph_size(batch.q_tokens) if extend and way is not PassMode.EAGER else batch.q_tokens
        )
        selects = extend and batch.max_kv > self._topk
        experts = 1 - (1 - _CHOSEN / _ROUTED) ** tokens
        return (1.0, experts, tokens, selects * batch.q_tokens, selects * batch.pairs)

    def _modelled(self, batch: Batch, way: PassMode, attention_us: float, scale: float) -> float:
        features = self._features(batch, way)
        rest_us = sum(weight * x for weight, x in zip(self._weights, features, strict=True))
        launch_us = 0.0
        if way in _LAUNCHED and batch.mode is Mode.EXTEND:
            selects = batch.max_kv > self._topk
            eager = way is PassMode.EAGER
            launch_us = self._launch_us.get((eager, selects)) or self._launch_us.get(
                (eager, not selects), 0.0
            )
        return max(attention_us + scale * rest_us, scale * launch_us)

    def _kind(self, measured: EnginePass) -> tuple[bool, bool]:
        return measured.way is PassMode.EAGER, measured.batch.max_kv > self._topk

    def _waits(self, one: Observed) -> bool:
        """Whether a pass waited for its host."""
        measured = one.measured
        if measured.way not in _LAUNCHED or measured.batch.mode is not Mode.EXTEND:
            return False
        return measured.us > _HOST_BOUND * self._modelled(
            measured.batch, measured.way, one.attention_us, 1.0
        )

    def _residual(self, one: Observed) -> float:
        measured = one.measured
        modelled = self._modelled(measured.batch, measured.way, one.attention_us, 1.0)
        return log(measured.us / modelled)

    def _place(self, measured: EnginePass) -> tuple[object, float, float, float]:
        return self._place_of(measured.batch, measured.way)

    def _place_of(self, batch: Batch, way: PassMode) -> tuple[object, float, float, float]:
        """Where a pass is: its kind, and octaves of new tokens, context and sequences."""
        kind = PassMode.ENGINE if way is PassMode.TABLE_KERNEL else way
        decode = batch.mode is not Mode.EXTEND
        context = max(batch.pairs / batch.q_tokens, 1.0)
        return (kind, decode), log2(batch.q_tokens), log2(context), log2(batch.batch_size)

    def _correction(
        self,
        place: tuple[object, float, float, float],
        without: tuple[float, ...] | None = None,
    ) -> float:
        kind, new, context, size = place
        total = weight = 0.0
        for (other, *at), residual in self._residuals:
            if other != kind or tuple(at) == without:
                continue
            distance = (
                (new - at[0]) ** 2 + (context - at[1]) ** 2 / 4 + (size - at[2]) ** 2
            ) / _REACH**2
            if distance < 12:
                closeness = exp(-distance)
                total += closeness * residual
                weight += closeness
        return exp(total / (weight + _DOUBT)) if weight else 1.0


def graph_size(tokens: int) -> int:
    """Tokens that a prefill graph of so many new tokens runs; all beyond the largest, or where
    SGLang finds a graph too large."""
    at = bisect_left(GRAPH_SIZES, tokens)
    size = GRAPH_SIZES[at] if at < len(GRAPH_SIZES) else tokens
    return size if size <= MOST_PADDING * tokens else tokens


def modelled(
    passes: Iterable[EnginePass],
    attention_us: Callable[[EnginePass], float | None],
    index_topk: int,
    scale: float,
) -> NonAttentionModel | None:
    """The model of the passes whose attention has a price; None where these are too few."""
    observed = [
        Observed(one, us) for one in passes if (us := attention_us(one)) is not None and us < 1e12
    ]
    return NonAttentionModel(observed, index_topk, scale) if len(observed) >= 8 else None
