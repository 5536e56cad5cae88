"""Steering the indexer's rows: pairs of draft tokens in one row, where Hopper's kernel can.

SGLang flattens a verification of two draft tokens a sequence into one row a token on Hopper, and
passes whole rows on Blackwell only. The shape of the context lengths decides that everywhere
below, so returning Blackwell's shape is enough. Four draft tokens as two pairs cannot be said
that way and stay flattened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.engines.sglang import attempt

_ATTRIBUTE = "_nsa_tune_indexer"

PAIR = 2
"""Draft tokens a row that DeepGEMM's kernel for SM90 takes, besides one."""


def around_context_lens(
    original: Callable[..., Any],
    backend: Any,
    forward_mode: Any,
    cache_seqlens_int32: Any,
    seqlens_expanded: Any,
    batch_size: int,
) -> Any:
    """The hook around `_build_paged_mqa_schedule_2d_ctx_lens`: on capture, replay and eagerly."""
    indexer = backend.__dict__.get(_ATTRIBUTE)
    if indexer is None or not forward_mode.is_target_verify() or not indexer.paired(batch_size):
        return original(backend, forward_mode, cache_seqlens_int32, seqlens_expanded, batch_size)
    # As the engine does it for SM100.
    return cache_seqlens_int32.view(-1, 1).expand(-1, PAIR).contiguous()


class Indexer:
    """The rows of one backend. What was once answered for a batch size stays: a captured graph
    has its shapes, and a replay must bring the same ones."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._paired: dict[int, bool] = {}

    @classmethod
    def attach(cls, backend: Any, dispatcher: Dispatcher) -> None:
        """Steer `backend` from now on."""
        setattr(backend, _ATTRIBUTE, cls(dispatcher))

    def paired(self, batch_size: int) -> bool:
        """Whether `batch_size` sequences of two draft tokens go in one row each."""
        answer = self._paired.get(batch_size)
        if answer is None:
            layout = attempt("choosing the indexer's rows", self._layout, batch_size)
            answer = self._paired[batch_size] = layout in ("native", "pairs")
        return answer

    def _layout(self, batch_size: int) -> str | None:
        if batch_size < 1:
            return None
        return self._dispatcher.captured(batch_size, PAIR).indexer_layout
