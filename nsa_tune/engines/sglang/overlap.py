"""What neighbouring queries of a serving engine select in common, sampled.

SGLang's Triton kernel for few heads (--dsa-prefill-backend triton_sparse_mla --dsa-triton-union 4)
puts four neighbouring queries into a tile and goes through the keys that any of them selects. It is
faster only where they share most, and what they share is the model's and the text's. So it is
measured here, for the log and the doctor; nothing is decided by it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.kernels import copies, decode
from nsa_tune.engines.sglang.passes import is_plain_extend
from nsa_tune.engines.sglang.switch import paused

KEPT_AS = "shared-keys"
"""What the last share is kept as for the doctor."""
_TOKENS = 4
"""Queries of a tile."""
_ROWS = 512
"""Of the smallest call that is sampled."""
_TOKENS_A_SEQUENCE = 64
"""New tokens of a sequence, on average: with few a tile has queries of several."""
_SAMPLED_TILES = 16
_KEPT, _FEWEST = 8, 4
"""Samples of which the mean counts, and how many it needs."""
_SAID_ANEW = 5
"""Percent by which what queries share has changed, for the log to say so."""
_CALLS = 1009
"""A call of so many is sampled, which takes its host 0.6 ms; a prime, so that layers differ."""


class Overlap:
    """The device counts, and the numbers are copied behind it: no call waits for them."""

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """`event` makes what can be recorded and asked, as torch.cuda.Event is, its default."""
        self._event = event
        self._backend: Any = None
        self.stop()

    def start(self, backend: Any) -> None:
        """Sample the selections of `backend` from now on, anew."""
        self.stop()
        self._backend = backend

    def stop(self) -> None:
        """Sample nothing, and forget what was."""
        self._backend = None
        self._prefills = False
        self._calls, self._said = 0, -_SAID_ANEW
        self._counted: tuple[Any, Any] | None = None
        self._shares: deque[float] = deque(maxlen=_KEPT)

    @property
    def percent(self) -> int | None:
        """Keys of a query that those before it in its tile select too, in percent, rounded down;
        None until there are enough samples."""
        if len(self._shares) < _FEWEST:
            return None
        return int(100 * sum(self._shares) / len(self._shares))

    def begin(self, backend: Any, forward_batch: Any) -> None:
        """Call it once a pass, before its layers; `forward_batch` is None for a decode graph."""
        if backend is self._backend:
            seen = attempt("looking at a prefill", _has_neighbours, forward_batch)
            self._prefills = seen is True and not paused()

    def look(self, backend: Any, indices: Any) -> None:
        """Call it with each layer's selection: [rows, topk], -1 where empty."""
        if not self._prefills or backend is not self._backend:
            return
        self._calls += 1
        # Most calls end here: every layer of every pass comes by.
        if self._counted is None and self._calls % _CALLS:
            return
        if not attempt("sampling selected keys", self._look, indices):
            self.stop()

    def _look(self, indices: Any) -> bool:
        if self._counted is not None and self._counted[0].query():
            self._take(*self._counted[1].tolist())
            self._counted = None
        if self._counted is None and self._calls % _CALLS == 0 and _can_be_counted(indices):
            self._counted = self._count(indices)
        return True

    def _take(self, union: int, selected: int) -> None:
        if not selected:
            return
        self._shares.append((1 - union / selected) * _TOKENS / (_TOKENS - 1))
        percent = self.percent
        if percent is not None and abs(percent - self._said) >= _SAID_ANEW:
            self._said = percent
            text = f"of its selected keys a query shares {percent} % with those before it in a tile"
            say_once(logging.INFO, f"{text} of {_TOKENS}")
            last_start.keep(KEPT_AS, f"{text} of {_TOKENS}")

    def _count(self, indices: Any) -> tuple[Any, Any]:
        import torch

        counts = counted(indices)
        # Not from memory that pages: the host would wait for the copy.
        host = torch.empty(2, dtype=torch.int64, pin_memory=counts.is_cuda)
        host.copy_(counts, non_blocking=True)
        event = (self._event or torch.cuda.Event)()
        event.record()
        return event, host


def counted(indices: Any) -> Any:
    """[2] int64: the different keys of some tiles, and all that are selected; of a tile or more."""
    import torch

    tiles = len(indices) // _TOKENS
    step = max(tiles // _SAMPLED_TILES, 1)
    picked = indices[: tiles * _TOKENS].view(tiles, -1)[::step][:_SAMPLED_TILES]
    keys = picked.sort(1).values
    new = torch.ones_like(keys, dtype=torch.bool)
    new[:, 1:] = keys[:, 1:] != keys[:, :-1]
    selects = keys >= 0
    return torch.stack(((new & selects).sum(), selects.sum()))


OVERLAP = Overlap()


def start(runner: Any) -> None:
    """Sample what `runner`, SGLang's ModelRunner, will serve."""
    import torch

    if runner.is_draft_worker or not hasattr(runner.attn_backend, "dsa_index_topk"):
        return
    if torch.cuda.is_available():
        # The first sample loads its kernels: 90 ms that no pass should wait for.
        shape = (_TOKENS * _SAMPLED_TILES, int(runner.attn_backend.dsa_index_topk))
        counted(torch.zeros(shape, dtype=torch.int32, device="cuda"))
    OVERLAP.start(runner.attn_backend)


def around_sparse(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_flashmla_sparse`, which SGLang calls by keywords."""
    OVERLAP.look(backend, named.get("page_table_1"))
    return copies.around_sparse(original, backend, *rest, **named)


def around_fa3(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_fa3`, which SGLang calls by keywords."""
    OVERLAP.look(backend, named.get("page_table"))
    return decode.around_fa3(original, backend, *rest, **named)


def _has_neighbours(forward_batch: Any) -> bool:
    if forward_batch is None or not is_plain_extend(forward_batch):
        return False
    lens = forward_batch.extend_seq_lens_cpu
    return type(lens) is list and sum(lens) >= _TOKENS_A_SEQUENCE * len(lens)


def _can_be_counted(indices: Any) -> bool:
    import torch

    return (
        indices is not None
        and len(indices) >= _ROWS
        and indices.is_contiguous()
        and not torch.cuda.is_current_stream_capturing()
    )
