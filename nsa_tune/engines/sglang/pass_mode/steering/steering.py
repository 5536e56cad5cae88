"""Steering one engine: each of its prefill passes runs in the way that is the fastest for it.

All ranks of the engine run the same batches, or there is only one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import ALL_TOKENS
from nsa_tune.engines.extends import batch_of, sums_of
from nsa_tune.engines.sglang import attempt, say_once
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.choice import Choice
from nsa_tune.engines.sglang.pass_mode.steering.monitor import RegressionMonitor
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.whole_pass.capture import WholePassGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.expanded import USE_MHA
from nsa_tune.engines.sglang.prefill import (
    ENGINE_KERNEL,
    MADE_UP,
    changed,
    is_plain_extend,
    note,
)
from nsa_tune.engines.sglang.ranks import Ranks

GRAPHS, EAGER = "_nsa_tune_graphs", "_nsa_tune_eager"
"""Attributes of a graph backend and of a graph runner, while a pass runs in such a way."""
_ASKS_TABLE = frozenset({PassMode.TABLE_KERNEL, PassMode.EAGER})
"""Ways in which the table chooses, and notes, what runs."""
_TOGETHER = 256
"""Passes of any kind between two looks at what loses; equal on all ranks, which run all alike."""


class Steering:
    """Chooses how the prefill passes of one rank's model runner run, and runs them."""

    def __init__(
        self,
        runner: Any,
        index_topk: int,
        ranks: Ranks,
        *,
        graphs: Mapping[PassMode, WholePassGraphs],
        decode: RowGraphs | None,
    ) -> None:
        """`decode`: the decode graphs, if they may run a prefill in this engine."""
        self._runner = runner
        self._pool = runner.token_to_kv_pool
        self._graphs = runner.prefill_cuda_graph_runner
        self.ranks = ranks
        self._decode = decode
        self._passes = 0
        self.graphs = graphs
        """Whole-pass graphs of the plug-in, by the way that they run."""
        self.rows: Sequence[int] = () if decode is None else tuple(decode.sizes)
        """Rows of the decode graphs that may run a prefill, ascending."""
        sizes = tuple(sorted(self._graphs.capture_num_tokens))
        self.choice = Choice(sizes, index_topk, graphs, self.rows)
        self.off: frozenset[PassMode] = frozenset()
        """Ways that this engine's start has found wrong or slow: they are never taken."""
        self.times: PassTimes | None = None
        """None until they are measured: until then everything runs as SGLang has it."""
        self.monitor: RegressionMonitor | None = None
        self.last = PassMode.ENGINE
        """How the last pass ran."""
        self.forced: PassMode | None = None
        """While passes are measured: how the next one runs."""

    def forward(self, call: Forward) -> Any:
        """A pass: chosen, run, and now and then timed.

        What chooses is not caught: it is arithmetic over numbers that all ranks share, and an error
        in it would be every rank's. What times is one rank's alone, and is.
        """
        if self.forced is not None:
            return self._run(self.forced, call)
        self.passed()
        self.last = PassMode.ENGINE
        batch = self._sums(call.batch)
        if batch is None:
            return call.run()
        mode = self.last = self.fastest(batch, self.rows_of(call.batch))
        if mode not in _ASKS_TABLE:
            attempt("logging a pass", note, self._backend, call.batch, mode)
        watch = self.monitor
        start = None if watch is None else attempt("timing passes", _watched, watch, watch.begin)
        output = self._run(mode, call)
        if watch is not None and start is not None:
            engine_us = self.choice.estimates_us(self.times, batch).get(PassMode.ENGINE)
            if engine_us is not None:
                end = partial(watch.end, start, self._as_run(mode), engine_us)
                attempt("timing passes", _watched, watch, end)
        return output

    def fastest(self, batch: Batch, rows: int | None) -> PassMode:
        """The fastest way for a batch from its sums, as `Choice` has it: the same on all ranks."""
        disabled = self.monitor.disabled if self.monitor is not None else frozenset()
        return self.choice.fastest(self.times, batch, rows, self.off | disabled)

    def rows_of(self, forward_batch: Any) -> int | None:
        """Rows of decode graphs that a pass takes; None where these may not run it."""
        return None if self._decode is None else self._decode.rows_of(forward_batch)

    @contextmanager
    def forcing(self, mode: PassMode) -> Iterator[None]:
        """Within it each pass runs in this way."""
        self.forced = mode
        try:
            with attribute(self._backend, MADE_UP, True):
                yield
        finally:
            self.forced = None

    def _sums(self, forward_batch: Any) -> Batch | None:
        """What the way of a pass follows from; None where SGLang runs it as it has it."""
        if not is_plain_extend(forward_batch):
            return None
        # SGLang has no graph for these, whose place another way could take.
        if forward_batch.input_embeds is not None or forward_batch.replace_embeds is not None:
            return None
        extend_lens = forward_batch.extend_seq_lens_cpu
        # Whole-pass graphs take sequences without tokens for padding, which only stands at the end.
        if type(extend_lens) is not list or 0 in extend_lens:
            return None
        if self.times is None or self._is_loading():
            return None
        sums = sums_of(forward_batch.extend_prefix_lens_cpu, extend_lens)
        if sums is None or sums.batch_size == 1 or sums.max_kv <= self.choice.index_topk:
            return sums
        # Of such a batch the sums tell too little.
        return batch_of(forward_batch.extend_prefix_lens_cpu, extend_lens)

    @property
    def _backend(self) -> Any:
        """SGLang has another one for each number of draft tokens, if that changes."""
        return self._runner.attn_backend

    def _as_run(self, mode: PassMode) -> PassMode:
        """With the kernel that SGLang chose the table's way was SGLang's own."""
        same = mode is PassMode.TABLE_KERNEL and not changed(self._backend)
        return PassMode.ENGINE if same else mode

    def passed(self) -> None:
        """Count a pass, also one while the plug-in is paused: every so many of them all ranks leave
        out what rank 0 has seen to lose, and wait for it, however many each saw paused."""
        self._passes += 1
        if self.monitor is None or self._passes % _TOGETHER:
            return
        disabled = self.ranks.from_first(self.monitor.losing)
        for mode in sorted(disabled - self.monitor.disabled):
            say_once(
                logging.WARNING,
                f"{mode} is given up for now: its passes take longer than SGLang's own "
                f"({self.monitor.report()})",
            )
        for mode in sorted(self.monitor.disabled - disabled):
            say_once(logging.INFO, f"{mode} is tried again, after {self._passes} passes")
        self.monitor.disabled = disabled

    def _run(self, mode: PassMode, call: Forward) -> Any:
        if mode is PassMode.DECODE_GRAPH and self._decode is not None:
            return self._decode.run(call)
        if mode is PassMode.ENGINE:
            with attribute(self._backend, ENGINE_KERNEL, True):
                return call.run()
        if mode is PassMode.EAGER:
            # Dense MLA is absorbed behind a short prefix otherwise (expanded.py).
            expand = True if self.choice.index_topk == ALL_TOKENS else None
            with attribute(self._graphs, EAGER, True), attribute(self._backend, USE_MHA, expand):
                return call.run()
        whole = self.graphs.get(mode)
        with attribute(self._graphs.backend, GRAPHS, whole), _padded(self._graphs, whole):
            return call.run()

    def _is_loading(self) -> bool:
        """Whether a prefix may still be on its way from the host's memory, layer by layer.

        SGLang waits for each layer when attention asks for it, which a graph does not. The counter
        is put into the pool after the graphs were captured (hierarchical cache).
        """
        return getattr(self._pool, "layer_transfer_counter", None) is not None


def _watched(monitor: RegressionMonitor, call: Callable[[], Any]) -> Any:
    """`call`, which times. After an error nobody would see what loses: by rank 0's monitor SGLang
    runs all passes from the next look on."""
    try:
        return call()
    except Exception:
        monitor.give_up()
        raise


@contextmanager
def _padded(graphs: Any, whole: WholePassGraphs | None) -> Iterator[None]:
    """Within it SGLang's PrefillCudaGraphRunner pads a batch to the sizes of whole-pass graphs."""
    own = graphs.capture_num_tokens
    graphs.capture_num_tokens = own if whole is None else whole.sizes
    try:
        yield
    finally:
        graphs.capture_num_tokens = own


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it `owner` has the attribute, by which hooks further down know how a pass is to run.

    None sets nothing.
    """
    if value is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
