"""Answers SGLang's calls by nsa-tune's kernel: what all layers of a pass share is made once."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from nsa_tune.engines.sglang.edge import say_once
from nsa_tune.engines.sglang.topk.call import call_of, selection_of
from nsa_tune.engines.sglang.topk.times import TopkTimes

_SAME = (
    "lengths", "topk_transform_method", "cu_seqlens_q_topk", "topk_indices_offset", "row_starts",
    "batch_idx_list", "force_unfused_topk",
)  # fmt: skip
"""Arguments that are the same objects in all layers of a pass, or of a chunk in none."""


class Selector:
    """The selection of one process's prefills."""

    def __init__(self, times: TopkTimes, capturing: Callable[[], bool]) -> None:
        """`capturing` says whether the current stream is being captured."""
        self.times = times
        self._capturing = capturing
        self._last: tuple[object, ...] = ()
        self._shared: list[object] = []
        self._metadata: Callable[[], object] = object
        self._selection: Callable[[Any], Any] | None = None

    def select(self, named: Mapping[str, Any]) -> Any:
        """[rows, topk] int32 for a call with these arguments; None where SGLang has to answer."""
        logits, metadata = named["logits"], named["attn_metadata"]
        # What the engine may exchange within the metadata, or refresh.
        layout = (
            logits.shape, logits.stride(), logits.dtype, named["topk"], metadata.max_seq_len_k,
            id(metadata.real_page_table),
        )  # fmt: skip
        shared = [named.get(name) for name in _SAME]
        if not (
            self._metadata() is metadata
            and layout == self._last
            and all(map(is_, shared, self._shared))
        ):
            self._selection = self._prepared(named)
            # The engine's metadata is not kept from going; the kernel's own tensors are.
            self._metadata, self._last, self._shared = weakref.ref(metadata), layout, shared
        if self._selection is None or self._capturing():
            return None
        return self._selection(logits)

    def _prepared(self, named: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        call = call_of(named)
        if call is None:
            say_once(
                logging.INFO,
                "SGLang selects keys itself: nsa-tune's kernel cannot take this prefill's tensors",
            )
            return None
        if call.max_kv <= call.topk:
            return None
        if not self.times.is_win(call.method, call.logits.shape[0], call.max_kv):
            return None
        found: Callable[[Any], Any] = selection_of(call)
        return found
