"""Steering one engine: each prefill pass runs in the way that is the fastest for its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nsa_tune.backend.engines.sglang.edge import say_once
from nsa_tune.backend.engines.sglang.pass_mode.dense.graphs import DenseGraphs
from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.ranks.ranks import Ranks
from nsa_tune.backend.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.backend.engines.sglang.pass_mode.steering.choice import MARGIN, Choice, bucket
from nsa_tune.backend.engines.sglang.pass_mode.steering.watch import Watch
from nsa_tune.backend.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.backend.engines.sglang.passes import is_plain_extend, sums_of
from nsa_tune.backend.engines.sglang.prefill import OWN_KERNEL, changed
from nsa_tune.backend.types.batch import Batch

__all__ = ["DENSE", "EAGER", "MARGIN", "Steering", "bucket", "is_loading", "told"]

_TOGETHER = 256
"""Passes of any kind between two looks at what loses; equal on all ranks, which run all alike."""

DENSE, EAGER = "_nsa_tune_dense", "_nsa_tune_eager"
"""Attributes of a graph backend and of a graph runner, while a pass runs in such a way."""


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
        self._decode = decode
        self._rows: Sequence[int] = decode.sizes if decode is not None else ()
        self.dense = dense
        sizes = tuple(sorted(self._graphs.capture_num_tokens))
        self._choice = Choice(sizes, index_topk, dense, tuple(self._rows))
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
        """The fastest way for a batch, as `Choice` has it."""
        given_up = self.watch.given_up if self.watch is not None else frozenset()
        return self._choice.fastest(self.times, batch, rows, given_up)

    def estimates_us(self, batch: Batch, rows: int | None = None) -> dict[PassMode, float]:
        """What a pass takes in each way, as `Choice` has it."""
        return self._choice.estimates_us(self.times, batch, rows)

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
