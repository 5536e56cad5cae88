"""Steering the sparse MLA builders: which extends take MHA, the sparse or the decode kernel.

The engine asks, for all layers of a step at once, for the metadata of its batch. What it decides
there hangs upon two attributes of the builder and upon one field of what it returns:

- `reorder_batch_threshold`: requests of up to so many new tokens go with the decodes. It is lowered
  for a step to the decodes' own number, never raised: a batch need not be sorted for more.
- `fp8_use_mixed_batch` (an fp8 pool): whether all tokens that do not take MHA go through the
  decode kernel, or those of prefills through the sparse kernel, over latents that are dequantized
  before.
- `use_dense_mha` of the metadata's prefills, which the engine sets where MHA is exact. It is
  cleared only where the plug-in itself has made prefills out of what the engine would have taken
  for decodes. The indexer reads the same field, so its top-k is there whenever it is needed.

The attributes are restored when the call returns. A step with nothing but decodes, as a CUDA graph
holds it, is left alone, and so is one that is prepared for capturing or for drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.decision_log import DecisionLog, table_of
from nsa_tune.engines.extends import batch_of, selecting
from nsa_tune.engines.vllm import attempt
from nsa_tune.engines.vllm.facts import Facts
from nsa_tune.engines.vllm.lengths import Prefills, prefills_of
from nsa_tune.engines.vllm.priced import priced

ATTRIBUTE = "_nsa_tune"
_PATHS, _SPARSE, _PAGED = ("mla", "mha"), "flashmla_sparse", "flashmla_kv"
_BY_DECODE_KERNEL = frozenset({_PAGED, "flashmla_kv_mixed"})
"""Answers that mean vLLM's decode kernel: as SGLang calls it, and as vLLM does."""


class Step(NamedTuple):
    """How one step is prepared."""

    unchanged: bool
    """Whether as the engine does it by itself; the rest does not count then."""
    threshold: int | None = None
    """`reorder_batch_threshold`."""
    mixed: bool | None = None
    """`fp8_use_mixed_batch`; None where there is no such choice."""
    dense: bool = True
    """Whether prefills may take MHA where the engine says so."""


UNCHANGED = Step(unchanged=True)
"""As the engine does it by itself."""


def steer(builder: Any, prefill: Any) -> None:
    """Have `prefill` steer `builder` from now on: a `Prefill`, or a `DensePrefill`."""
    setattr(builder, ATTRIBUTE, prefill)


def around_build(
    original: Callable[..., Any],
    builder: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """The hook around `build`: of sparse MLA's base class, of FlashMLA's, which calls it, and of
    dense MLA's base class."""
    prefill = builder.__dict__.get(ATTRIBUTE)
    if (
        prefill is None
        or prefill.busy
        or fast_build
        or common_attn_metadata.max_query_len <= prefill.decode_tokens
    ):
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)
    metadata = attempt(
        "steering a prefill", prefill.prepared, original, builder, common_prefix_len,
        common_attn_metadata,
    )  # fmt: skip
    if metadata is None:
        delattr(builder, ATTRIBUTE)
    elif metadata is not UNCHANGED:
        return metadata
    # The base class's `build`, which FlashMLA's calls, is hooked too, and would decide again.
    prefill.busy = True
    try:
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)
    finally:
        prefill.busy = False


def around_capture(original: Callable[..., Any], builder: Any, common_attn_metadata: Any) -> Any:
    """The hook around `build_for_cudagraph_capture`: what a graph will hold is the engine's own."""
    prefill = builder.__dict__.get(ATTRIBUTE)
    if prefill is None or prefill.busy:
        return original(builder, common_attn_metadata)
    prefill.busy = True
    try:
        return original(builder, common_attn_metadata)
    finally:
        prefill.busy = False


class Prefill:
    """Steers one builder."""

    def __init__(
        self, builder: Any, dispatcher: Dispatcher, facts: Facts, log: DecisionLog | None
    ) -> None:
        # Each question alone takes less time than a plan, which answers more.
        self._path = dispatcher.chooser("prefill_path")
        self._kernel = dispatcher.chooser("sparse_prefill")
        leaving = priced(dispatcher, facts.layers, facts.workspace_tokens, leaving=True)
        self._kernel_for_decodes = leaving.chooser("sparse_prefill")
        self._uniform = bool(builder.require_uniform_decodes)
        self._log = log
        self._dense = facts.dense
        self._switches = facts.layout is KVLayout.FP8_PACKED
        self._index_topk = facts.profile.index_topk
        self._most_tokens = facts.shard_tokens
        # With one row the decode kernel's scratch takes 4096 bytes a token and head, twice its fp32
        # results. Of an eighth of the step's most tokens that is less than the queries that such a
        # step leaves out; an engine that sends everything there anyway has seen to it.
        mixed = getattr(builder, "fp8_use_mixed_batch", False)
        self._most_paged = facts.most_tokens if mixed else facts.most_tokens // 8
        self._table = table_of(dispatcher.setting)
        self.decode_tokens = facts.decode_tokens
        self._mha = {mixed: Step(False, self.decode_tokens, mixed) for mixed in (None, False, True)}
        self._sparse = Step(False, self.decode_tokens, mixed=False, dense=False)
        self.busy = False
        """Whether a step is being prepared whose decisions are made."""

    def prepared(
        self, original: Callable[..., Any], builder: Any, common_prefix_len: int, batch: Any
    ) -> Any:
        """The metadata of `batch`, prepared as the table says, or the step that is the engine's
        own; the builder is as it was afterwards."""
        step = self.step(builder, batch)
        unchanged, threshold, mixed, dense = step
        if unchanged:
            return step
        engines_threshold = builder.reorder_batch_threshold
        engines_mixed = None if mixed is None else builder.fp8_use_mixed_batch
        self.busy = True
        try:
            builder.reorder_batch_threshold = threshold
            if mixed is not None:
                builder.fp8_use_mixed_batch = mixed
            metadata = original(builder, common_prefix_len, batch, False)
        finally:
            builder.reorder_batch_threshold = engines_threshold
            if mixed is not None:
                builder.fp8_use_mixed_batch = engines_mixed
            self.busy = False
        if not dense and metadata.prefill is not None:
            metadata.prefill.use_dense_mha = False
        return metadata

    def step(self, builder: Any, batch: Any) -> Step:
        """How to prepare the step of `batch`, which has a prefill."""
        lens = batch.seq_lens_cpu_upper_bound
        if lens is None or batch.causal is not True:
            return UNCHANGED
        prefills = prefills_of(batch.query_start_loc_cpu, lens, self.decode_tokens)
        if prefills is None or prefills.step_tokens >= self._most_tokens:
            return UNCHANGED
        sums = prefills.sums
        exact = self._dense and sums.max_kv <= self._index_topk
        mha = exact and self._path(sums) == "mha"
        # The engine's own MHA spares the indexer's work, which is not in the times of either way.
        step = UNCHANGED
        if mha:
            step = self._mha[builder.fp8_use_mixed_batch if self._switches else None]
        elif self._switches and not (exact and self._engine_has_prefills(builder, prefills)):
            step = self._by_kernel(builder, prefills)
        if self._log is not None and (count := self._log.due()):
            self._write(count, builder, prefills, step, exact=exact, mha=mha)
        return step

    def _engine_has_prefills(self, builder: Any, prefills: Prefills) -> bool:
        """Whether the engine takes any of the step's requests for a prefill."""
        threshold = builder.reorder_batch_threshold or 1
        if not self._uniform:
            return max(prefills.new_lens) > threshold
        # Its decodes are those at the front which are as long as the first.
        first = prefills.new_lens[0]
        return prefills.has_decodes or first > threshold or {first} != {*prefills.new_lens}

    def _by_kernel(self, builder: Any, prefills: Prefills) -> Step:
        """The step in which prefills take the table's kernel."""
        mixed = builder.fp8_use_mixed_batch
        sums, prefix_lens, new_lens, *_ = prefills
        asked = selecting(sums, prefix_lens, new_lens, self._index_topk)
        if mixed or not self._engine_has_prefills(builder, prefills):
            kernel = self._kernel_for_decodes(asked)
            return self._sparse if kernel == _SPARSE else UNCHANGED
        fits = prefills.step_tokens <= self._most_paged
        if fits and self._kernel(asked) in _BY_DECODE_KERNEL:
            return Step(False, builder.reorder_batch_threshold, mixed=True)
        return UNCHANGED

    def _write(
        self, count: int, builder: Any, prefills: Prefills, step: Step, *, exact: bool, mha: bool
    ) -> None:
        batch = batch_of(prefills.prefix_lens, prefills.new_lens)
        assert batch is not None and self._log is not None, "it has sums"
        has_prefills = self._engine_has_prefills(builder, prefills)
        engines_mha = exact and has_prefills
        engines_mixed = builder.fp8_use_mixed_batch if self._switches else None
        mixed = engines_mixed if step.unchanged else step.mixed
        lowered = not step.unchanged and step.threshold == self.decode_tokens
        self._log.write(
            count,
            batch,
            own={
                "prefill_path": _PATHS[engines_mha],
                "sparse_prefill": _impl(engines_mixed, has_prefills),
            },
            taken={
                "prefill_path": _PATHS[mha or (engines_mha and step.dense)],
                "sparse_prefill": _impl(mixed, has_prefills or lowered),
            },
            table=self._table,
        )


def _impl(mixed: bool | None, prefills: bool) -> str | None:
    if mixed is None:
        return None
    return _SPARSE if prefills and not mixed else _PAGED
