"""Whole prefill passes, host included: what they take under each setup of the engine.

The plug-in measures passes in the engine, by the way that they run, and decides by these times.
Here the same times and the same decisions (`Choice`) price the passes of a trace. What was not
measured is priced by a model of the rest of a pass, if there is one, and else has no price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.dense.graphs import Kind, room
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.rows.verify import requests_of
from nsa_tune.engines.sglang.pass_mode.steering.choice import Choice
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.reports.replay.flags import PREFILL_FLAG
from nsa_tune.reports.replay.prices import Price, Pricer, Way
from nsa_tune.reports.replay.rest import RestOfPass, kind_of

ENGINE, PLUGIN = str(Way.ENGINE), str(Way.PLUGIN)
EAGER = "--disable-prefill-cuda-graph"
"""The setup without prefill graphs, by its flag."""


class Basis(StrEnum):
    """What the time of a pass rests on."""

    MEASURED = "measured"
    """Passes like this were measured in the engine, in this way."""
    TABLE = "measured, with another kernel"
    """Measured with the engine's own kernel; the table says what another one adds or saves."""
    LAUNCHES = "measured in a graph"
    """Measured in a graph; without one it takes no less than the fastest eager pass."""
    REST = "rest of a pass"
    """Attention by the table, and the stated rest."""
    NONE = "not priced"


class Took(NamedTuple):
    """What one pass takes."""

    way: str
    """How it runs."""
    us: float
    """0 without a price."""
    basis: Basis


@dataclass(frozen=True, slots=True)
class _Captured:
    """Dense graphs of one kind, by their sizes."""

    kind: Kind
    sizes: frozenset[int]
    index_topk: int

    def fits(self, size: int, sequences: int) -> bool:
        return size in self.sizes and sequences <= room(size, self.index_topk)


def choice_of(times: PassTimes, index_topk: int, graph_tokens: int | None = None) -> Choice:
    """The choice of the engine in which `times` were measured, with its prefill graphs of up to
    `graph_tokens` tokens.

    Raises:
        UsageError: when the times do not say which graphs it had.
    """
    try:
        sizes = _sizes(times.key["prefill_sizes"], graph_tokens)
        dense: Mapping[str, Any] = times.key["dense_sizes"]  # type: ignore[assignment]
        kinds = {
            PassMode(mode): Kind.MLA if mode == PassMode.DENSE_MLA_GRAPH else Kind.MHA
            for mode in dense
        }
        graphs = {
            mode: _Captured(kind, frozenset(_sizes(dense[mode], graph_tokens)), index_topk)
            for mode, kind in kinds.items()
        }
        rows = _sizes(times.key["decode_sizes"], None)
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the pass times do not say which graphs the engine had: {error}"
        ) from error
    return Choice(sizes, index_topk, graphs, rows)


def _sizes(found: Any, most: int | None) -> tuple[int, ...]:
    return tuple(sorted(int(one) for one in found if most is None or one <= most))


class WholePrefills:
    """Prices whole prefill passes under each setup."""

    def __init__(
        self,
        times: PassTimes,
        pricer: Pricer,
        rest: RestOfPass | None = None,
        *,
        source: str = "",
        graph_tokens: int | None = None,
    ) -> None:
        """Raises UsageError, as `choice_of`."""
        self.source = source
        self.times = times
        self.rest = rest
        self.choice = choice_of(times, pricer.setting.profile.index_topk, graph_tokens)
        drafts = times.key.get("draft_tokens")
        self._width = drafts if isinstance(drafts, int) else 1
        self._kernels = {
            f"{PREFILL_FLAG} {flags.kernel}": (i, flags.kernel)
            for i, flags in enumerate(pricer.flags[True])
            if flags.kernel is not None and flags.threshold is None
        }
        self.setups = (ENGINE, PLUGIN, *self._kernels, EAGER)
        """The engine by itself, with the plug-in, and by itself with one flag each."""

    def padding(self, q_tokens: int) -> int:
        """Tokens of SGLang's own graph for so many new tokens that are not new."""
        return self.choice.padding(q_tokens)

    def estimates_us(self, batch: Batch) -> dict[PassMode, float]:
        """What a pass takes in each way that can run it and was measured, in microseconds."""
        return self.choice.estimates_us(self.times, batch, self._rows(batch))

    def took(self, batch: Batch, price: Price, *, graph: bool) -> dict[str, Took]:
        """What a pass takes under each setup; `price` is that of its attention.

        Args:
            batch: an extend.
            price: of the same batch.
            graph: whether SGLang runs it as a graph, with its defaults.
        """
        return dict(zip(self.setups, self._took(batch, price, graph), strict=True))

    def _took(self, batch: Batch, price: Price, graph: bool) -> Iterator[Took]:
        estimates = self.estimates_us(batch)
        padding = self.padding(batch.q_tokens) if graph else 0
        rested = partial(self._rested, batch, graph=graph, padding=padding)
        engine_us = estimates.get(PassMode.ENGINE)
        engine = (
            Took(PassMode.ENGINE, engine_us, Basis.MEASURED)
            if engine_us is not None
            else rested(PassMode.ENGINE, price.total_us(Way.ENGINE))
        )
        yield engine
        own, steered = _kernel(price, Way.ENGINE), _kernel(price, Way.PLUGIN)
        mode = self.choice.of(estimates, self.times, batch)
        if mode in estimates:
            yield Took(mode, estimates[mode], Basis.MEASURED)
        elif own == steered:
            yield engine
        else:
            yield self._other_kernel(engine, price.total_us(Way.PLUGIN), price, rested)
        for number, kernel in self._kernels.values():
            table_us = estimates.get(PassMode.TABLE_KERNEL)
            if kernel == own:
                yield engine
            elif kernel == steered and table_us is not None:
                yield Took(kernel, table_us, Basis.MEASURED)
            else:
                other = self._other_kernel(engine, price.static[number], price, rested)
                yield other._replace(way=kernel)
        yield self._eager(estimates, engine, batch, price)

    def _other_kernel(self, engine: Took, attention_us: float, price: Price, rested: Any) -> Took:
        """SGLang's own way with another kernel, which was not measured in it."""
        if attention_us == float("inf"):
            return Took(PassMode.TABLE_KERNEL, 0.0, Basis.NONE)
        if engine.basis is not Basis.MEASURED:
            found: Took = rested(PassMode.TABLE_KERNEL, attention_us)
            return found
        changed_us = engine.us + attention_us - price.total_us(Way.ENGINE)
        return Took(PassMode.TABLE_KERNEL, max(changed_us, 0.0), Basis.TABLE)

    def _eager(
        self, estimates: Mapping[PassMode, float], engine: Took, batch: Batch, price: Price
    ) -> Took:
        eager_us = estimates.get(PassMode.EAGER)
        if eager_us is not None:
            return Took(PassMode.EAGER, eager_us, Basis.MEASURED)
        launched_us = self.times.launched_us(1, selects=batch.max_kv > self.choice.index_topk)
        if engine.basis is Basis.NONE or launched_us is None:
            return Took(PassMode.EAGER, 0.0, Basis.NONE)
        if engine.basis is Basis.MEASURED:
            return Took(PassMode.EAGER, max(engine.us, launched_us), Basis.LAUNCHES)
        # Without a graph nothing fills it, and its launches are those that were measured here.
        attention_us = price.total_us(Way.ENGINE)
        rested = self._rested(batch, PassMode.EAGER, attention_us, graph=True, padding=0)
        return rested._replace(us=max(rested.us, launched_us))

    def _rested(
        self, batch: Batch, way: str, attention_us: float, *, graph: bool, padding: int
    ) -> Took:
        """By the rest of a pass."""
        if self.rest is None:
            return Took(way, 0.0, Basis.NONE)
        sums = (batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs)
        kind = kind_of(extend=True, graph=graph)
        took_ms = self.rest.ms(kind, attention_us / 1e3, sums, padding=padding)
        return Took(way, took_ms * 1e3, Basis.REST)

    def _rows(self, batch: Batch) -> int | None:
        """Rows of decode graphs; None where these run no prefills, or the lengths are unknown."""
        if not self.choice.rows:
            return None
        if self._width == 1:
            return batch.q_tokens
        lens = batch.lens
        if lens is None:
            return None
        return self._width * requests_of([new for _, new in lens], self._width)


def _kernel(price: Price, way: Way) -> str:
    """The kernel of sparse attention, or of MHA."""
    number = list(Way).index(way)
    arms: Sequence[str] = [one.arms[number] for one in price.steps if one.point == "prefill"]
    return arms[0].rpartition("/")[2] if arms else ""
