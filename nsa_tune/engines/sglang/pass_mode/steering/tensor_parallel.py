"""Steering an engine whose ranks all run the same batches, or which has one rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang.edge import say_once
from nsa_tune.engines.sglang.pass_mode.dense.graphs import DenseGraphs
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks.ranks import Ranks
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.choice import Choice
from nsa_tune.engines.sglang.pass_mode.steering.steering import EAGER, Steering, told
from nsa_tune.engines.sglang.passes import is_plain_extend
from nsa_tune.engines.sglang.prefill import OWN_KERNEL, changed

_TOGETHER = 256
"""Passes of any kind between two looks at what loses; equal on all ranks, which run all alike."""


@dataclass(frozen=True, slots=True)
class PrefillSums:
    """A prefill by its sums."""

    batch: Batch
    rows: int | None
    """How many it takes in decode graphs; None where these may not run it."""


class TensorParallel(Steering[PrefillSums]):
    """Chooses how prefill passes run that are the same on all ranks."""

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
        super().__init__(runner, dense=dense, decode=decode)
        self._ranks = ranks
        self._passes = 0
        self._backend = runner.attn_backend
        self._decode = decode
        self._choice = Choice(self._sizes, index_topk, dense, self.rows)

    def forward(self, call: Forward) -> Any:
        """As every engine's; now and then all ranks give up what loses."""
        if self.forced is None:
            self._give_up_together()
        return super().forward(call)

    def _sums(self, forward_batch: Any) -> PrefillSums | None:
        if not is_plain_extend(forward_batch):
            return None
        # SGLang has no graph for these, whose place another way could take.
        if forward_batch.input_embeds is not None or forward_batch.replace_embeds is not None:
            return None
        extend_lens = forward_batch.extend_seq_lens_cpu
        # Dense graphs take sequences without tokens for padding, which only stands at the end.
        if type(extend_lens) is not list or 0 in extend_lens:
            return None
        batch = sums_of(forward_batch.extend_prefix_lens_cpu, extend_lens)
        if batch is None or self.times is None or self._is_loading():
            return None
        rows = None if self._decode is None else self._decode.rows_of(forward_batch)
        return PrefillSums(batch, rows)

    def fastest(self, prefill: PrefillSums) -> PassMode:
        """The fastest way for a batch, as `Choice` has it."""
        given_up = self.watch.given_up if self.watch is not None else frozenset()
        return self._choice.fastest(self.times, prefill.batch, prefill.rows, given_up)

    def _engine_us(self, prefill: PrefillSums) -> float | None:
        return self._choice.estimates_us(self.times, prefill.batch).get(PassMode.ENGINE)

    def _as_run(self, mode: PassMode) -> PassMode:
        """With the kernel that SGLang chose the table's way was SGLang's own."""
        same = mode is PassMode.TABLE_KERNEL and not changed(self._backend)
        return PassMode.ENGINE if same else mode

    def _give_up_together(self) -> None:
        """Every so many passes all ranks give up what rank 0 has seen to lose, and nothing else."""
        self._passes += 1
        if self.watch is None or self._passes % _TOGETHER:
            return
        given_up = self._ranks.from_first(self.watch.found)
        for mode in sorted(given_up - self.watch.given_up):
            say_once(
                logging.WARNING,
                f"{mode} is given up for now: its passes take longer than SGLang's own "
                f"({self.watch.report()})",
            )
        for mode in sorted(self.watch.given_up - given_up):
            say_once(logging.INFO, f"{mode} is tried again, after {self._passes} passes")
        self.watch.given_up = given_up

    def _run(self, mode: PassMode, call: Forward) -> Any:
        if mode is PassMode.DECODE_GRAPH and self._decode is not None:
            return self._decode.run(call)
        if mode is PassMode.ENGINE:
            with told(self._backend, OWN_KERNEL, True):
                return call.run()
        if mode is PassMode.EAGER:
            with told(self._graphs, EAGER, True):
                return call.run()
        return super()._run(mode, call)
