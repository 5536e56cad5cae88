"""Steering an engine with data-parallel attention, whose ranks have batches of their own.

They run each pass together. By default a step in which one rank prefills while another decodes has
no graph on any rank. Where no rank has more new tokens than a decode graph has rows, all of them
can replay that graph: the prefill's new tokens are rows (rows/decode.py), a decoding rank's
sequences are, and an idle rank's padding. Where all ranks have prompts that are short enough, all
of them can replay a dense graph of the size that SGLang pads them to.

What is decided follows from what was gathered (ranks/gathered.py), from rank 0's times and from
captured sizes on which the ranks have agreed, and from nothing else.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang.edge import say_once
from nsa_tune.engines.sglang.pass_mode.dense.graphs import DenseGraphs, Kind
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks.gathered import (
    MOST_SEQUENCES,
    Gathered,
    Said,
)
from nsa_tune.engines.sglang.pass_mode.rows.decode import as_decode
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.choice import MARGIN, bucket
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.switch import paused

_DECODE_FLAGS = ("can_run_dp_cuda_graph", "can_run_decode_cuda_graph")
"""A batch's field, by release: whether all ranks may replay a decode graph."""
PREFILL_FLAGS = ("can_run_dp_breakable_cuda_graph", "can_run_dp_prefill_cuda_graph")
"""The same for a prefill graph."""


class DataParallel(Steering[Gathered]):
    """Chooses how the passes of one rank's model runner run, as every other rank does."""

    def __init__(
        self,
        runner: Any,
        index_topk: int,
        *,
        dense: Mapping[PassMode, DenseGraphs],
        decode: RowGraphs | None,
    ) -> None:
        """`decode` has the decode graphs that may run a prefill; None where none may."""
        super().__init__(runner, dense=dense, decode=decode)
        self._index_topk = index_topk
        self._logged: frozenset[PassMode] = frozenset()
        """What this rank has seen to lose, as far as the log says so."""

    def says(self, batch: Any) -> Said | None:
        """What the other ranks must know of this one's batch; None: all leave it to SGLang.

        Args:
            batch: SGLang's ScheduleBatch, or None where the rank has nothing to do.
        """
        if self.times is None or paused() or self._is_loading():
            return None
        lost = self._lost()
        if batch is None or batch.forward_mode.is_idle():
            return Said(lost=lost)
        if _asks_for_more(batch):
            return None
        mode = batch.forward_mode
        if mode is type(mode).DECODE:
            return self._decoding(batch.seq_lens_cpu, lost)
        return self._prefilling(batch, lost) if mode is type(mode).EXTEND else None

    def _decoding(self, kv_lens: Any, lost: frozenset[PassMode]) -> Said | None:
        """What a rank says that decodes sequences of these keys, a tensor in the host's memory."""
        if kv_lens is None or len(kv_lens) > MOST_SEQUENCES:
            return None
        context = -(-int(kv_lens.sum()) // len(kv_lens))
        return Said(context, len(kv_lens), short=int(kv_lens.max()) <= self._index_topk, lost=lost)

    def _prefilling(self, batch: Any, lost: frozenset[PassMode]) -> Said | None:
        extend_lens = batch.extend_lens
        if type(extend_lens) is not list or 0 in extend_lens or len(extend_lens) > MOST_SEQUENCES:
            return None
        sums = sums_of(batch.prefix_lens, extend_lens)
        if sums is None:
            return None
        return Said(
            -(-sums.pairs // sums.q_tokens),
            len(extend_lens),
            prefill=True,
            short=sums.max_kv <= self._index_topk,
            fresh=sums.kv_tokens == sums.q_tokens,
            lost=lost,
        )

    def _lost(self) -> frozenset[PassMode]:
        """What this rank has seen to lose; it says so once, although its times change."""
        if self.watch is None:
            return frozenset()
        for mode in sorted(self.watch.found - self._logged):
            say_once(
                logging.WARNING,
                f"{mode} is given up for now: on this rank its passes take longer than SGLang's "
                f"own ({self.watch.report()})",
            )
        self._logged = self.watch.found
        return self.watch.found

    def _sums(self, forward_batch: Any) -> Gathered | None:
        gathered = forward_batch.original_global_num_tokens_cpu
        return gathered if isinstance(gathered, Gathered) and gathered.prefill else None

    def fastest(self, gathered: Gathered) -> PassMode:
        """The fastest way for a step: the same on all ranks."""
        engine_us = self._engine_us(gathered)
        if engine_us is None:
            return PassMode.ENGINE
        best, least_us = PassMode.ENGINE, (1 - MARGIN) * engine_us
        for mode, size in self._possible(gathered):
            pass_us = self._slowest_us(mode, size, gathered)
            if pass_us is not None and pass_us < least_us:
                best, least_us = mode, pass_us
        return best

    def _possible(self, gathered: Gathered) -> Iterator[tuple[PassMode, int]]:
        """Ways that all ranks can take besides SGLang's own, and the size of the graph."""
        lost = frozenset[PassMode]().union(*(one.lost for one in gathered.said))
        rows = bucket(self.rows, max(gathered))
        if rows is not None and PassMode.DECODE_GRAPH not in lost:
            yield PassMode.DECODE_GRAPH, rows
        size = bucket(self._sizes, max(gathered))
        # An idle rank takes part in a prefill graph with a sequence that may be too long.
        if size is None or not gathered.graph or not min(gathered):
            return
        for mode, graphs in self.dense.items():
            fresh = graphs.kind is Kind.MLA or all(one.fresh for one in gathered.said)
            short = all(one.prefill and one.short for one in gathered.said)
            fits = all(graphs.fits(size, one.sequences) for one in gathered.said)
            if fresh and short and fits and mode not in lost:
                yield mode, size

    def _engine_us(self, gathered: Gathered) -> float | None:
        """What the step takes SGLang by itself."""
        # Without a graph each rank computes no more than its own tokens' attention, and together
        # all tokens' experts.
        mean = -(-sum(gathered) // len(gathered))
        eager_us = self._slowest_us(PassMode.EAGER, mean, gathered)
        size = bucket(self._sizes, max(gathered))
        if not gathered.graph or size is None:
            return eager_us
        graph_us = self._slowest_us(PassMode.ENGINE, size, gathered)
        if min(gathered):
            return graph_us
        # Whether an idle rank keeps all from the graph differs between releases.
        found = [one for one in (eager_us, graph_us) if one is not None]
        return min(found, default=None)

    def _slowest_us(self, mode: PassMode, q_tokens: int, gathered: Gathered) -> float | None:
        """The time of the slowest rank; None where that of any was not measured."""
        slowest_us = None
        for tokens, said in zip(gathered, gathered.said, strict=True):
            if tokens and self.times is not None:
                selects = mode is not PassMode.DECODE_GRAPH and not said.short
                pass_us = self.times.pass_us(mode, q_tokens, said.context, selects=selects)
                if pass_us is None:
                    return None
                slowest_us = max(pass_us, slowest_us or 0.0)
        return slowest_us

    def _run(self, mode: PassMode, call: Forward) -> Any:
        if mode is PassMode.DECODE_GRAPH:
            return _run_rows(call)
        if mode is PassMode.EAGER:  # only while passes are measured
            call = call.of(copy.copy(call.batch))
            set_flag(call.batch, PREFILL_FLAGS, False)
        return super()._run(mode, call)


def set_flag(batch: Any, names: Sequence[str], value: bool) -> None:
    """Set the one of these fields that this release's batches have."""
    for name in names:
        if hasattr(batch, name):
            setattr(batch, name, value)


def _run_rows(call: Forward) -> Any:
    """Take part in the replay of a decode graph, whatever this rank's batch is."""
    mode = call.batch.forward_mode
    prefill = mode is type(mode).EXTEND
    rows = as_decode(call.batch) if prefill else None
    batch = copy.copy(call.batch) if rows is None else rows.forward_batch
    batch.is_extend_in_batch = False
    set_flag(batch, _DECODE_FLAGS, True)
    output = call.of(batch).run()
    if rows is not None:
        logits = output.logits_output
        logits.next_token_logits = rows.of_ends(logits.next_token_logits)
    return output


def _asks_for_more(batch: Any) -> bool:
    """Whether more is asked for than each sequence's next token, or something else goes in."""
    return bool(
        batch.return_logprob
        or batch.return_hidden_states
        or batch.input_embeds is not None
        or batch.replace_embeds is not None
        or (batch.multimodal_inputs and any(one is not None for one in batch.multimodal_inputs))
        or batch.spec_info is not None
        or batch.dllm_config is not None
        or batch.encoder_lens is not None
    )
