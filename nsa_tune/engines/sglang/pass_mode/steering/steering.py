"""Steering one engine: each of its prefill passes runs in the way that is the fastest for it.

What all engines have in common is here. How a way is chosen depends on whether the ranks share
their batches (tensor_parallel.py) or have batches of their own (data_parallel.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from nsa_tune.engines.sglang.pass_mode.dense.graphs import DenseGraphs
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.watch import Watch
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

DENSE, EAGER = "_nsa_tune_dense", "_nsa_tune_eager"
"""Attributes of a graph backend and of a graph runner, while a pass runs in such a way."""

Sums = TypeVar("Sums")
"""The numbers of a pass by which its way is chosen."""


class Steering(ABC, Generic[Sums]):
    """Chooses how the passes of one rank's model runner run, and runs them."""

    def __init__(
        self,
        runner: Any,
        *,
        dense: Mapping[PassMode, DenseGraphs],
        decode: RowGraphs | None,
    ) -> None:
        """`decode`: the decode graphs, if they may run a prefill in this engine."""
        self._pool = runner.token_to_kv_pool
        self._graphs = runner.prefill_cuda_graph_runner
        self._sizes: Sequence[int] = tuple(sorted(self._graphs.capture_num_tokens))
        """Tokens of SGLang's own prefill graphs, ascending."""
        self.dense = dense
        self.rows: Sequence[int] = () if decode is None else tuple(decode.sizes)
        """Rows of the decode graphs that may run a prefill, ascending."""
        self.times: PassTimes | None = None
        """None until they are measured: until then everything runs as SGLang has it."""
        self.watch: Watch | None = None
        self.last = PassMode.ENGINE
        """How the last pass ran."""
        self.forced: PassMode | None = None
        """While passes are measured: how the next one runs."""

    def forward(self, call: Forward) -> Any:
        """A pass: chosen, run, and now and then timed.

        Nothing is caught here. What decides is arithmetic over numbers that all ranks share; an
        error in it would be every rank's.
        """
        if self.forced is not None:
            return self._run(self.forced, call)
        self.last = PassMode.ENGINE
        sums = self._sums(call.batch)
        if sums is None:
            return call.run()
        mode = self.last = self.fastest(sums)
        start = self.watch.begin() if self.watch is not None else None
        output = self._run(mode, call)
        if start is not None and self.watch is not None:
            engine_us = self._engine_us(sums)
            if engine_us is not None:
                self.watch.end(start, self._as_run(mode), engine_us)
        return output

    @abstractmethod
    def _sums(self, forward_batch: Any) -> Sums | None:
        """What the way of a pass follows from; None where SGLang runs it as it has it."""

    @abstractmethod
    def fastest(self, sums: Sums, /) -> PassMode:
        """The fastest way for a pass: the same on all ranks."""

    @abstractmethod
    def _engine_us(self, sums: Sums, /) -> float | None:
        """What the pass takes SGLang by itself; None where that was not measured."""

    def _as_run(self, mode: PassMode) -> PassMode:
        """How the last pass ran, which was to run in this way."""
        return mode

    def _run(self, mode: PassMode, call: Forward) -> Any:
        """Run a pass by dense graphs, if those are what `mode` asks for, or as SGLang has it."""
        with told(self._graphs.backend, DENSE, self.dense.get(mode)):
            return call.run()

    def _is_loading(self) -> bool:
        """Whether a prefix may still be on its way from the host's memory, layer by layer.

        SGLang waits for each layer when attention asks for it, which a graph does not. The counter
        is put into the pool after the graphs were captured (hierarchical cache).
        """
        return getattr(self._pool, "layer_transfer_counter", None) is not None


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
