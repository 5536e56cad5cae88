"""Sparse attention of a prefill with 8 heads: FlashMLA, or SGLang's Triton kernel over unions.

FlashMLA computes 64 heads however few there are. SGLang's kernel for few heads
(--dsa-prefill-backend triton_sparse_mla --dsa-triton-union 4, since 0.5.22) puts four neighbouring
queries into a tile and goes through the keys that any of them selects. That is faster only where
they share most. What they share is the model's and the text's: it is sampled while the engine
serves, and both kernels are timed with selections that share stated parts when it starts. Until
there are samples FlashMLA runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from nsa_tune.backend import libraries
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.eligible import Engine, Part
from nsa_tune.engines.sglang.kernel_swap import Call, KernelSwap
from nsa_tune.engines.sglang.kernels import copies, decode
from nsa_tune.engines.sglang.passes import is_plain_extend

_HEADS = 8
"""With 16 a union was slower than FlashMLA even where 95 % is shared (H200)."""
_TOKENS = 4
"""Queries of a tile."""
_ROWS = (511, 2047, 8191)
"""Odd, so that what is left over of tiles is compiled before the engine serves."""
_PERCENT = (0, 50, 70, 80, 90, 95)
_TOKENS_A_SEQUENCE = 64
"""New tokens of a sequence, on average: with few a tile has queries of several."""
_KEYS = 65536
_SAMPLED_TILES = 16
_KEPT, _FEWEST = 8, 4
"""Samples of which the mean counts, and how many it needs."""
_SAID_ANEW = 5
"""Percent by which what queries share has changed, for the log to say so."""
_CALLS = 31
"""A call of so many is sampled; a prime, so that layers differ. With 61 layers these are two of a
pass, so that what other prompts shared counts for four passes."""


class Overlap:
    """What neighbouring queries of a serving engine select in common.

    The device counts, and the numbers are copied behind it: no call waits for them.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """`event` makes what can be recorded and asked, as torch.cuda.Event is, its default."""
        self._event = event
        self.prefills = False
        """Whether the pass that runs is a prefill of neighbouring queries."""
        self.taken = 0
        """Calls that the other kernel has answered."""
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
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

    def look(self, indices: Any) -> None:
        """Call it with each layer's selection: [rows, topk], -1 where empty; now and then it is
        sampled."""
        if self._counted is not None and self._counted[0].query():
            union, selected = self._counted[1].tolist()
            if selected:
                self._shares.append((1 - union / selected) * _TOKENS / (_TOKENS - 1))
                percent = self.percent
                if percent is not None and abs(percent - self._said) >= _SAID_ANEW:
                    self._said = percent
                    text = f"of its selected keys a query shares {percent} %"
                    say_once(logging.INFO, f"{text} with those before it in a tile of {_TOKENS}")
            self._counted = None
        self._calls += 1
        if self._counted is None and self._calls % _CALLS == 0:
            self._counted = self._count(indices)

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


def begin(backend: Any, forward_batch: Any) -> None:
    """Call it once a pass, before its layers; `forward_batch` is None for a decode graph."""
    if GROUPED.is_on(backend):
        seen = attempt("looking at a prefill", _has_neighbours, forward_batch)
        OVERLAP.prefills = seen is True


def _has_neighbours(forward_batch: Any) -> bool:
    if forward_batch is None or not is_plain_extend(forward_batch):
        return False
    lens = forward_batch.extend_seq_lens_cpu
    return type(lens) is list and sum(lens) >= _TOKENS_A_SEQUENCE * len(lens)


def takes(backend: Any, rows: int) -> bool:
    """Whether a layer of so many new tokens is not FlashMLA's where SGLang calls that."""
    percent = OVERLAP.percent if OVERLAP.prefills else None
    return percent is not None and GROUPED.takes((rows, percent), backend)


def around_sparse(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_flashmla_sparse`, which SGLang calls by keywords."""
    if not rest and GROUPED.is_on(backend):
        attended = GROUPED.run(_attended, backend, named)
        if attended is not None:
            return attended
    return copies.around_sparse(original, backend, *rest, **named)


def around_fa3(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_fa3`: where a table takes that, its selections are sampled."""
    if not rest and GROUPED.is_on(backend):
        GROUPED.run(_sampled, named.get("page_table"))
    return decode.around_fa3(original, backend, *rest, **named)


def _attended(backend: Any, named: Mapping[str, Any]) -> Any:
    indices = named["page_table_1"]
    if not _sampled(indices) or not takes(backend, len(indices)):
        return None
    attended = over_unions(named)
    OVERLAP.taken += attended is not None
    return attended


def _sampled(indices: Any) -> bool:
    """Whether a call may be another kernel's at all; some of these are sampled."""
    import torch

    if (
        not OVERLAP.prefills
        or indices is None
        or len(indices) < _ROWS[0]
        or not indices.is_contiguous()
        or torch.cuda.is_current_stream_capturing()
    ):
        return False
    OVERLAP.look(indices)
    return True


def over_unions(named: Mapping[str, Any]) -> Any:
    """SGLang's Triton kernel on a call of `_forward_flashmla_sparse`; None for one that it cannot
    take."""
    import torch

    from nsa_tune.backend.libraries.sglang import calls

    q, pool, indices = named["q_all"], named["kv_cache"], named["page_table_1"]
    lengths = named.get("topk_length")
    if not (
        named.get("attn_sink") is None
        and lengths is not None
        and len(lengths) == len(q)
        and q.dtype is torch.bfloat16
        and pool.dtype is torch.bfloat16
        and indices.dtype is torch.int32
        and len(q) == len(indices)
        and q.shape[1] == _HEADS
        and all(tensor.is_contiguous() for tensor in (q, pool, indices))
    ):
        return None
    return calls.triton_sparse(
        q, pool.view(-1, pool.shape[-1]), indices, named["sm_scale"], named["v_head_dim"],
        lengths, _TOKENS,
    )  # fmt: skip


def sharing(rows: int, topk: int, percent: int, keys: int, device: Any) -> Any:
    """[rows, topk] int32 below `keys`: of the keys of a row the one before it selects `percent`."""
    import torch

    order = torch.randperm(keys, device=device)
    new = round((1 - percent / 100) * topk)
    first = torch.arange(rows, device=device)[:, None] * new
    return order[(first + torch.arange(topk, device=device)) % keys].int()


def sparse_calls(engine: Engine) -> Iterator[Call]:
    """A layer's calls with so many new tokens, whose selections share so much."""
    import torch

    OVERLAP.forget()
    backend, device = engine.backend, torch.device("cuda", torch.cuda.current_device())
    # What runs otherwise, faster padding included.
    original = partial(
        copies.around_sparse, type(backend)._forward_flashmla_sparse.__wrapped__, backend
    )
    heads, topk = int(backend.num_q_heads), int(backend.dsa_index_topk)
    width = copies.RANK + copies.ROPE
    latents = torch.randn(_KEYS, 1, width, device=device).bfloat16()
    # The first sample loads its kernels: 90 ms that no pass should wait for.
    counted(sharing(_TOKENS * _SAMPLED_TILES, topk, 0, _KEYS, device))
    most = engine.argument("chunked_prefill_size") or 0
    # An engine with smaller chunks has no memory for more rows.
    for rows in (rows for rows in _ROWS if most <= 0 or rows <= max(most, _ROWS[0])):
        q = torch.randn(rows, heads, width, device=device).bfloat16()
        for percent in _PERCENT:
            named = {
                "q_all": q, "kv_cache": latents, "v_head_dim": copies.RANK,
                "page_table_1": sharing(rows, topk, percent, _KEYS, device),
                "sm_scale": width**-0.5,
                "topk_length": torch.full((rows,), topk, dtype=torch.int32, device=device),
            }  # fmt: skip
            yield Call((rows, percent), partial(original, **named), partial(over_unions, named))


def _is_there() -> bool:
    return libraries.answering("sglang_triton") is not None


GROUPED = KernelSwap(
    "grouped", Part.GROUPED, "attends for few heads", ("rows", "percent shared keys"), sparse_calls,
    # FlashAttention-3, which a table may take instead, is up to 5 % faster than FlashMLA.
    margin=0.06, tolerance=0.02, after_proof=True, owner_of=lambda engine: engine.backend,
    applies=lambda engine: int(engine.backend.num_q_heads) == _HEADS and _is_there(),
    kernel="SGLang's Triton kernel over unions",
)  # fmt: skip
