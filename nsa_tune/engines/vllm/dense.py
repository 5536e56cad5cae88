"""Steering the builder of dense MLA: which short extends take MHA.

vLLM takes a request of up to `reorder_batch_threshold` new tokens for a decode, which is absorbed
(512 with FlashAttention on Hopper), and expands longer ones. By FLOPs expanding pays from about 170
on. The threshold is lowered for a step where the table says so, to the decodes' own number, never
raised: a batch need not be sorted for more. It is restored when the call returns.

Asking takes up to 1 ms, so small batches, which MHA never suits by the table, are not asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.vllm.facts import Facts
from nsa_tune.engines.vllm.lengths import prefills_of
from nsa_tune.engines.vllm.prefill import UNCHANGED
from nsa_tune.engines.vllm.priced import ABSORBED


class DensePrefill:
    """Steers one builder of dense MLA."""

    def __init__(self, dispatcher: Dispatcher, facts: Facts) -> None:
        self._path = dispatcher.chooser("prefill_path")
        # The first answer takes 0.2 s, which no step should wait for.
        self._path(Batch.extend([1], [1]).sums)
        self._fewest_pairs = _fewest_pairs(dispatcher.policies["dense_prefill"])
        self.decode_tokens = facts.decode_tokens
        self.busy = False
        """As in `Prefill`."""

    def prepared(
        self, original: Callable[..., Any], builder: Any, common_prefix_len: int, batch: Any
    ) -> Any:
        """The metadata of `batch`, prepared as the table says, or `UNCHANGED`."""
        threshold = builder.reorder_batch_threshold
        short = self._short(batch, threshold)
        if short is None or short.pairs < self._fewest_pairs or self._path(short) != "mha":
            return UNCHANGED
        self.busy = True
        try:
            builder.reorder_batch_threshold = self.decode_tokens
            return original(builder, common_prefix_len, batch, False)
        finally:
            builder.reorder_batch_threshold = threshold
            self.busy = False

    def _short(self, batch: Any, threshold: int) -> Batch | None:
        """The extends of `batch` that vLLM would take for decodes; None without."""
        lens = batch.seq_lens_cpu_upper_bound
        if lens is None or batch.causal is not True:
            return None
        prefills = prefills_of(batch.query_start_loc_cpu, lens, self.decode_tokens)
        if prefills is None:
            return None
        new = prefills.new_lens
        count = next((i for i, rows in enumerate(new) if rows > threshold), len(new))
        return sums_of(prefills.prefix_lens[:count], new[:count]) if count else None


def _fewest_pairs(policy: Policy) -> float:
    """Half the pairs of the smallest measured batch that is faster by MHA."""
    mla = {row.batch: row.latency_us or 0.0 for row in policy.rows if row.arm == ABSORBED}
    others = (row for row in policy.rows if row.arm != ABSORBED)
    faster = [row.batch for row in others if (row.latency_us or inf) < mla.get(row.batch, 0.0)]
    return min((Batch.parse(batch).pairs for batch in faster), default=inf) / 2
