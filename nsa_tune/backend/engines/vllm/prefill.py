"""Steering the sparse MLA builders: which extends take MHA, the sparse or the decode kernel.

The engine asks, for all layers of a step at once, for the metadata of its batch. What it decides
there hangs upon two attributes of the builder and upon one field of what it returns:

- `reorder_batch_threshold`: requests of up to so many new tokens go with the decodes. It is lowered
  for a step to the decodes' own number, never raised: a batch need not be sorted for more.
- `fp8_use_mixed_batch` (an fp8 pool): whether all tokens that do not take MHA go through the
  decode kernel, or those of prefills through the sparse kernel, over latents that are widened
  before.
- `use_dense_mha` of the metadata's prefills, which the engine sets where MHA is exact. It is
  cleared only where the plug-in itself has made prefills out of what the engine would have taken
  for decodes. The indexer reads the same field, so its top-k is there whenever it is needed.

The attributes are put back when the call returns. A step with nothing but decodes, as a CUDA graph
holds it, is left alone, and so is one that is prepared for capturing or for drafting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import sub
from typing import Any, NamedTuple

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.decision_log import DecisionLog
from nsa_tune.backend.engines.extends import batch_of, sums_of_kv
from nsa_tune.backend.engines.vllm.edge import attempt
from nsa_tune.backend.engines.vllm.facts import Facts
from nsa_tune.backend.types.layouts import KVLayout

__all__ = ["Prefill", "Step", "around_build", "around_capture"]

ATTRIBUTE = "_nsa_tune"
_SPARSE, _PAGED = "flashmla_sparse", "flashmla_kv"


class Step(NamedTuple):
    """How one step is prepared."""

    own: bool
    """Whether as the engine does it by itself; the rest does not count then."""
    threshold: int | None = None
    """`reorder_batch_threshold`."""
    mixed: bool | None = None
    """`fp8_use_mixed_batch`; None where there is no such choice."""
    dense: bool = True
    """Whether prefills may take MHA where the engine says so."""


_OWN = Step(own=True)


def around_build(
    original: Callable[..., Any],
    builder: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """The hook around `build`, of the base class and of FlashMLA's, which calls it."""
    prefill = builder.__dict__.get(ATTRIBUTE)
    if (
        prefill is None
        or prefill.busy
        or fast_build
        or common_attn_metadata.max_query_len <= prefill.decode_tokens
    ):
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)
    step = attempt("steering a prefill", prefill.step, builder, common_attn_metadata)
    if step is not None and step.own:
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)
    metadata = step and attempt(
        "preparing a steered step", _prepared, original, builder, step, common_prefix_len,
        common_attn_metadata,
    )  # fmt: skip
    if metadata is None:
        delattr(builder, ATTRIBUTE)
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)
    return metadata


def _prepared(
    original: Callable[..., Any], builder: Any, step: Step, common_prefix_len: int, batch: Any
) -> Any:
    """The metadata of `batch`, prepared in that way; the builder is as it was afterwards."""
    prefill = builder.__dict__[ATTRIBUTE]
    own = builder.reorder_batch_threshold, getattr(builder, "fp8_use_mixed_batch", None)
    prefill.busy = True
    try:
        _set(builder, step.threshold, step.mixed)
        metadata = original(builder, common_prefix_len, batch, False)
    finally:
        _set(builder, *own)
        prefill.busy = False
    if not step.dense and metadata.prefill is not None:
        metadata.prefill.use_dense_mha = False
    return metadata


def _set(builder: Any, threshold: int | None, mixed: bool | None) -> None:
    builder.reorder_batch_threshold = threshold
    if mixed is not None:
        builder.fp8_use_mixed_batch = mixed


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
        self._uniform = bool(builder.require_uniform_decodes)
        self._log = log
        self._dense = facts.dense
        self._switches = facts.layout is KVLayout.FP8_PACKED
        self._index_topk = facts.profile.index_topk
        self._most_tokens = facts.shard_tokens
        # With one row the decode kernel's scratch takes 4096 bytes a token and head, twice its fp32
        # results. Of an eighth of the step's most tokens that is less than the queries that such a
        # step leaves out; an engine that sends everything there anyway has seen to it.
        own = getattr(builder, "fp8_use_mixed_batch", False)
        self._most_paged = facts.most_tokens if own else facts.most_tokens // 8
        setting = dispatcher.setting
        self._table = {
            "gpu": setting.device.name,
            "model": setting.profile.name,
            "heads": setting.heads,
            "kv_layout": str(setting.layout),
        }
        self.decode_tokens = facts.decode_tokens
        self.busy = False
        """Whether a step is being prepared whose decisions are made."""

    @classmethod
    def attach(
        cls, builder: Any, dispatcher: Dispatcher, facts: Facts, log: DecisionLog | None
    ) -> None:
        """Steer `builder` from now on."""
        setattr(builder, ATTRIBUTE, cls(builder, dispatcher, facts, log))

    def step(self, builder: Any, batch: Any) -> Step:
        """How to prepare the step of `batch`, which has a prefill."""
        starts = batch.query_start_loc_cpu.tolist()
        lens = batch.seq_lens_cpu_upper_bound
        if lens is None or batch.causal is not True or starts[-1] >= self._most_tokens:
            return _OWN
        # The decodes come first.
        first = 0 if starts[1] > self.decode_tokens else self._first_prefill(starts)
        news = list(map(sub, starts[first + 1 :], starts[first:]))
        kv_lens = lens.tolist()[first : first + len(news)]
        sums = sums_of_kv(kv_lens, news)
        if sums is None:
            return _OWN
        threshold = builder.reorder_batch_threshold or 1
        own_prefills = self._own_prefills(threshold, starts[1], news, first)
        exact = self._dense and sums.max_kv <= self._index_topk
        mha = exact and self._path(sums) == "mha"
        # The engine's own MHA spares the indexer's work, which is not in the times of either way.
        step = _OWN
        if mha:
            mixed = builder.fp8_use_mixed_batch if self._switches else None
            step = Step(False, self.decode_tokens, mixed)
        elif self._switches and not (exact and own_prefills):
            step = self._by_kernel(builder, self._kernel(sums), starts[-1], own_prefills)
        if self._log is not None and (count := self._log.due()):
            self._write(count, builder, kv_lens, news, step, (exact, mha, own_prefills))
        return step

    def _first_prefill(self, starts: list[int]) -> int:
        """The first request of more tokens than a decode has."""
        most = self.decode_tokens
        if most == 1:
            return bisect_left(range(len(starts) - 1), 1, key=lambda i: starts[i + 1] - i - 1)
        for i, new in enumerate(map(sub, starts[1:], starts)):
            if new > most:
                return i
        return len(starts) - 1

    def _own_prefills(self, threshold: int, length: int, news: list[int], first: int) -> bool:
        """Whether the engine takes any of the step's requests for a prefill; `length` is that of
        the first request."""
        if not self._uniform:
            return max(news) > threshold
        # Its decodes are those at the front which are as long as the first.
        if first or length > threshold:
            return True
        return news.count(length) + news.count(0) < len(news)

    def _by_kernel(self, builder: Any, kernel: str | None, tokens: int, own_prefills: bool) -> Step:
        """The step in which prefills take `kernel`."""
        mixed = builder.fp8_use_mixed_batch
        if kernel == _SPARSE and (mixed or not own_prefills):
            return Step(False, self.decode_tokens, mixed=False, dense=False)
        if kernel == _PAGED and not mixed and own_prefills and tokens <= self._most_paged:
            return Step(False, builder.reorder_batch_threshold, mixed=True)
        return _OWN

    def _write(
        self, count: int, builder: Any, kv_lens: list[int], news: list[int], step: Step,
        facts: tuple[bool, bool, bool],
    ) -> None:  # fmt: skip
        batch = batch_of(list(map(sub, kv_lens, news)), news)
        assert batch is not None and self._log is not None, "it has sums"
        exact, mha, own_prefills = facts
        own_mha = exact and own_prefills
        own_mixed = builder.fp8_use_mixed_batch if self._switches else None
        mixed = own_mixed if step.own else step.mixed
        lowered = not step.own and step.threshold == self.decode_tokens
        self._log.write(
            count,
            batch,
            own={
                "prefill_path": _named(own_mha),
                "sparse_prefill": _impl(own_mixed, own_prefills),
            },
            taken={
                "prefill_path": _named(mha or (own_mha and step.dense)),
                "sparse_prefill": _impl(mixed, own_prefills or lowered),
            },
            table=self._table,
        )


def _named(mha: bool) -> str:
    return "mha" if mha else "mla"


def _impl(mixed: bool | None, prefills: bool) -> str | None:
    if mixed is None:
        return None
    return _SPARSE if prefills and not mixed else _PAGED
