"""Timing both decode kernels when the engine starts, and comparing what they compute.

Read in SGLang 0.5.17, 0.5.18 and 0.5.23, layers/attention/dsa_backend.py (`forward_decode`,
`_forward_fa3`): each row is a sequence of one query, whose page table names the selected slots, -1
behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

_SIZES = (1, 2, 4, 8, 16, 32)
"""Rows that are measured. More are never faster: the selection is split among fewer programs."""
_SLOTS = 65536
_CALLS, _ROUNDS = 16, 5
_MARGIN = 0.03
_TOLERANCE = 0.02
"""Largest relative error between the two kernels' outputs; bf16 leaves 0.003 to 0.008."""


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """One layer's attention in a decode pass of so many rows, by both kernels."""

    rows: int
    engine_us: float
    own_us: float

    @property
    def is_win(self) -> bool:
        """Whether nsa-tune's kernel is faster by more than 3 %."""
        return self.own_us < (1 - _MARGIN) * self.engine_us


@dataclass(frozen=True, slots=True)
class Call:
    """A call of SGLang's `_forward_fa3` that nsa-tune's kernel can answer."""

    q: Any
    """[rows, heads, 512] bf16: absorbed queries."""
    q_rope: Any
    """[rows, heads, 64] bf16."""
    pool: Any
    """[slots, 576] bf16."""
    slots: Any
    """[rows, index_topk] int32, -1 where empty."""
    scale: float

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return len(self.q)

    def attended(self) -> Any:
        """[rows, heads, 512] bf16, by nsa-tune's kernel."""
        from nsa_tune.backend.kernels.split_sparse_mla import split_sparse_mla_parts

        return split_sparse_mla_parts(self.q, self.q_rope, self.pool, self.slots, self.scale)

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Call | None:
        """The call with these keyword arguments; None for one that the kernel cannot answer."""
        import torch

        q, q_rope, pool = named["q_nope"], named["q_rope"], named["kv_cache"]
        slots = named["page_table"]
        one_query_a_row = (
            named["max_seqlen_q"] == 1 and named["page_size"] == 1 and len(slots) == len(q)
        )
        read_as_is = (
            all(one.dtype is torch.bfloat16 for one in (q, q_rope, pool))
            and slots.dtype is torch.int32
            and slots.is_contiguous()
            and pool.is_contiguous()
            and q.stride(-1) == q_rope.stride(-1) == 1
        )
        if not one_query_a_row or not read_as_is or named["logit_cap"]:
            return None
        return cls(q, q_rope, pool.view(-1, pool.shape[-1]), slots, named["sm_scale"])


def wins(times: Sequence[DecodeTime]) -> frozenset[int]:
    """Rows of a graph that get nsa-tune's kernel: those between sizes that all were faster."""
    found: set[int] = set()
    below = 0
    for one in sorted(times, key=lambda one: one.rows):
        if not one.is_win:
            break
        found |= set(range(below + 1, one.rows + 1))
        below = one.rows
    return frozenset(found)


def measure(backend: Any, original: Callable[..., Any]) -> Iterator[DecodeTime]:
    """Time both kernels; `original` is the `_forward_fa3` of SGLang's attention `backend`.

    Raises:
        RuntimeError: when they do not compute the same, or a call is not as expected.
    """
    for rows in _SIZES:
        named = _made_up(backend, rows)
        call = Call.of(named)
        if call is None:
            raise RuntimeError("nsa-tune's decode kernel cannot take a call of this engine")
        engine = partial(original, backend, **named)
        _compare(engine().view(call.q.shape), call.attended())
        yield DecodeTime(rows, *_timed_us((engine, call.attended)))


def _made_up(backend: Any, rows: int) -> dict[str, Any]:
    """A layer's call with `rows` sequences, each with as many keys as are ever selected."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    heads, topk = backend.num_q_heads, backend.dsa_index_topk
    rank, rope = backend.kv_lora_rank, backend.qk_rope_head_dim
    values: Any = {"dtype": torch.bfloat16, "device": device}
    whole: Any = {"dtype": torch.int32, "device": device}
    starts = torch.arange(rows + 1, **whole)
    return {
        # SGLang projects queries head by head.
        "q_nope": torch.randn(heads, rows, rank, **values).transpose(0, 1),
        "q_rope": torch.randn(rows, heads, rope, **values),
        "kv_cache": torch.randn(_SLOTS, 1, rank + rope, **values),
        "v_head_dim": rank,
        "page_table": torch.randint(_SLOTS, (rows, topk), **whole),
        "cache_seqlens": torch.full((rows,), topk, **whole),
        "cu_seqlens_q": starts, "cu_seqlens_k": starts * topk, "max_seqlen_q": 1,
        "sm_scale": (rank + rope) ** -0.5, "logit_cap": 0.0, "page_size": 1,
    }  # fmt: skip


def _compare(engine: Any, own: Any) -> None:
    error = float((own.float() - engine.float()).norm() / engine.float().norm())
    # No number is no agreement either.
    if not error < _TOLERANCE:
        raise RuntimeError(f"nsa-tune's decode kernel is {error:.3f} away from SGLang's")


def _timed_us(ways: Sequence[Callable[[], Any]]) -> list[float]:
    """GPU time of one call of each way in a graph, in microseconds: the least of some rounds."""
    import torch

    graphs = [torch.cuda.CUDAGraph() for _ in ways]
    for graph, way in zip(graphs, ways, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                way()
    found = [float("inf")] * len(ways)
    for number in range(_ROUNDS + 1):
        for i, graph in enumerate(graphs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:  # the first round warms up
                found[i] = min(found[i], begin.elapsed_time(end) * 1e3 / _CALLS)
    return found
