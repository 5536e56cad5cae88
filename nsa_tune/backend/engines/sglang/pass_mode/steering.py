"""Steering one engine: each prefill pass runs in the way that is the fastest for its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nsa_tune.backend.engines.sglang.edge import say_once
from nsa_tune.backend.engines.sglang.pass_mode.dense_graphs import DenseGraphs, Kind
from nsa_tune.backend.engines.sglang.pass_mode.ranks import Ranks
from nsa_tune.backend.engines.sglang.pass_mode.row_graphs import RowGraphs
from nsa_tune.backend.engines.sglang.pass_mode.times import PassMode, PassTimes
from nsa_tune.backend.engines.sglang.pass_mode.watch import Watch
from nsa_tune.backend.engines.sglang.passes import is_plain_extend, sums_of
from nsa_tune.backend.engines.sglang.prefill import OWN_KERNEL, changed
from nsa_tune.backend.types.batch import Batch

__all__ = ["DENSE", "EAGER", "MARGIN", "Steering", "bucket", "is_loading", "told"]

_TOGETHER = 256
"""Passes of any kind between two looks at what loses; equal on all ranks, which run all alike."""

DENSE, EAGER = "_nsa_tune_dense", "_nsa_tune_eager"
"""Attributes of a graph backend and of a graph runner, while a pass runs in such a way."""
_MOST_PADDING = 2
"""SGLang runs a prefill eagerly where a graph would have more than so many times its tokens."""
MARGIN = 0.03
"""Another way must be faster than SGLang's own by this share of a pass."""
_KERNEL_MARGIN = 0.01
"""The same for another kernel in SGLang's own way, of whose time on the GPU the table is sure."""
_EAGER_MARGIN = 0.25
"""By this share an eager pass must be faster than all other ways. The host launches each of its
kernels, and has more to do while it serves: passes took up to 38 % longer than measured before."""


class Steering:
    """Chooses how prefill passes of one model runner run, and runs them."""

    def __init__(
        self,
        runner: Any,
        index_topk: int,
        ranks: Ranks,
        *,
        dense: Mapping[PassMode, DenseGraphs],
        decode: RowGraphs | None,
    ) -> None:
        """`decode`: the decode graphs, if they may run a prefill in this engine."""
        self._ranks = ranks
        self._passes = 0
        self._backend = runner.attn_backend
        self._pool = runner.token_to_kv_pool
        self._graphs = runner.prefill_cuda_graph_runner
        self._sizes: Sequence[int] = sorted(self._graphs.capture_num_tokens)
        self._decode = decode
        self._rows: Sequence[int] = decode.sizes if decode is not None else ()
        self._index_topk = index_topk
        self.dense = dense
        self.times: PassTimes | None = None
        """None until they are measured: then everything runs as SGLang has it."""
        self.watch: Watch | None = None
        self.last = PassMode.ENGINE
        """How the last pass ran."""
        self.forced: PassMode | None = None
        """While passes are measured: how the next one runs."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of the decode graphs that may run a prefill, ascending."""
        return self._rows

    def forward(
        self,
        original: Callable[..., Any],
        runner: Any,
        forward_batch: Any,
        rest: Sequence[Any],
    ) -> Any:
        """A pass: chosen, run by `original`, which is SGLang's own method, and now and then timed.

        Nothing is caught here. What decides is arithmetic over integers that all ranks share; an
        error in it would be every rank's.
        """
        if self.forced is not None:
            return self._run(original, runner, self.forced, forward_batch, rest)
        self._give_up_together()
        self.last = PassMode.ENGINE
        batch = self._batch(forward_batch)
        if batch is None or self.times is None or is_loading(self._pool):
            return original(runner, forward_batch, *rest)
        rows = None if self._decode is None else self._decode.rows_of(forward_batch)
        mode = self.last = self.fastest(batch, rows)
        start = self.watch.begin() if self.watch is not None else None
        output = self._run(original, runner, mode, forward_batch, rest)
        if start is not None and self.watch is not None:
            engine_us = self.estimates_us(batch).get(PassMode.ENGINE)
            if engine_us is not None:
                self.watch.end(start, self._as_run(mode), engine_us)
        return output

    def _as_run(self, mode: PassMode) -> PassMode:
        """How the last pass ran: with the kernel that SGLang chose it was SGLang's own."""
        same = mode is PassMode.TABLE_KERNEL and not changed(self._backend)
        return PassMode.ENGINE if same else mode

    @staticmethod
    def _batch(forward_batch: Any) -> Batch | None:
        if not is_plain_extend(forward_batch):
            return None
        extend_lens = forward_batch.extend_seq_lens_cpu
        # Dense graphs take sequences without tokens for padding, which only stands at the end.
        if type(extend_lens) is not list or 0 in extend_lens:
            return None
        return sums_of(forward_batch.extend_prefix_lens_cpu, extend_lens)

    def _give_up_together(self) -> None:
        """Every so many passes all ranks give up what rank 0 has seen to lose."""
        self._passes += 1
        if self.watch is None or self._passes % _TOGETHER:
            return
        given_up = self._ranks.from_first(self.watch.found)
        for mode in sorted(given_up - self.watch.given_up):
            say_once(
                logging.WARNING,
                f"{mode} is given up: its passes take longer than SGLang's own "
                f"({self.watch.report()})",
            )
        self.watch.given_up = given_up

    def fastest(self, batch: Batch, rows: int | None) -> PassMode:
        """The fastest way for a batch from its sums.

        Args:
            batch: the sums.
            rows: how many it takes in decode graphs; None where these may not run it.
        """
        estimates = self.estimates_us(batch, rows)
        engine_us = estimates.get(PassMode.ENGINE)
        given_up = self.watch.given_up if self.watch is not None else frozenset()
        best = self._usual(estimates, given_up)
        if engine_us is None:
            return best
        least_us = engine_us
        ways = {mode: us for mode, us in estimates.items() if mode not in given_up}
        eager_us = ways.pop(PassMode.EAGER, None)
        for mode, pass_us in ways.items():
            margin = _KERNEL_MARGIN if mode is PassMode.TABLE_KERNEL else MARGIN
            if pass_us < (1 - margin) * engine_us and pass_us < least_us:
                best, least_us = mode, pass_us
        if eager_us is not None and eager_us < (1 - _EAGER_MARGIN) * least_us:
            return PassMode.EAGER
        return best

    @staticmethod
    def _usual(estimates: Mapping[PassMode, float], given_up: frozenset[PassMode]) -> PassMode:
        """SGLang's own way; where a pass like this was not measured, by the table's kernel.

        Few new tokens leave the host more to do than the GPU, and another kernel may leave it more
        still: that was measured. With many only the GPU's time counts, which the table has.
        """
        known = PassMode.TABLE_KERNEL in estimates or PassMode.TABLE_KERNEL in given_up
        return PassMode.ENGINE if known else PassMode.TABLE_KERNEL

    def estimates_us(self, batch: Batch, rows: int | None = None) -> dict[PassMode, float]:
        """What a pass takes in each way that can run it and was measured, in microseconds.

        Args:
            batch: its sums.
            rows: how many it takes in decode graphs; None where these may not run it.
        """
        times = self.times
        size = bucket(self._sizes, batch.q_tokens)
        if times is None or size is None:
            return {}
        context = batch.pairs / batch.q_tokens
        selects = batch.max_kv > self._index_topk
        found = {
            mode: times.pass_us(mode, size, context, selects=selects)
            for mode in (PassMode.ENGINE, PassMode.TABLE_KERNEL)
        }
        if not selects:
            found[PassMode.EAGER] = times.pass_us(PassMode.EAGER, batch.q_tokens, context)
        for mode, graphs in self.dense.items():
            if self._fits(graphs, batch, size):
                found[mode] = times.pass_us(mode, size, context)
        if rows is not None:
            found[PassMode.DECODE_GRAPH] = self._decode_us(times, rows, context)
        return {mode: pass_us for mode, pass_us in found.items() if pass_us is not None}

    def _fits(self, graphs: DenseGraphs, batch: Batch, size: int) -> bool:
        return (
            size <= _MOST_PADDING * batch.q_tokens
            and (graphs.kind is Kind.MLA or batch.kv_tokens == batch.q_tokens)
            and batch.max_kv <= self._index_topk
            and graphs.fits(size, batch.batch_size)
        )

    def _decode_us(self, times: PassTimes, rows: int, context: float) -> float | None:
        """The time by decode graphs: as many of the largest as are full, and one of the rest."""
        if not self._rows:
            return None
        full, rest = divmod(rows, self._rows[-1])
        total = 0.0
        for count, needed in ((full, self._rows[-1]), (1 if rest else 0, rest)):
            size = bucket(self._rows, needed) if count else None
            if size is not None:
                pass_us = times.pass_us(PassMode.DECODE_GRAPH, size, context)
                if pass_us is None:
                    return None
                total += count * pass_us
        return total

    def _run(
        self,
        original: Callable[..., Any],
        runner: Any,
        mode: PassMode,
        forward_batch: Any,
        rest: Sequence[Any],
    ) -> Any:
        if mode is PassMode.DECODE_GRAPH and self._decode is not None:
            return self._decode.run(original, runner, forward_batch, rest)
        owner, name, value = {
            PassMode.ENGINE: (self._backend, OWN_KERNEL, True),
            PassMode.EAGER: (self._graphs, EAGER, True),
        }.get(mode, (self._graphs.backend, DENSE, self.dense.get(mode)))
        with told(owner, name, value):
            return original(runner, forward_batch, *rest)


@contextmanager
def told(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it the hooks further down know how a pass is to run; None tells them nothing."""
    if value is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


def is_loading(pool: Any) -> bool:
    """Whether a prefix may still be on its way from the host's memory, layer by layer.

    SGLang waits for each layer when attention asks for it, which a graph does not. The counter is
    put into the pool after the graphs were captured (hierarchical cache).
    """
    return getattr(pool, "layer_transfer_counter", None) is not None


def bucket(sizes: Sequence[int], tokens: int) -> int | None:
    """The captured size that a batch is padded to; None where it fits into none."""
    return next((size for size in sizes if size >= tokens), None)
