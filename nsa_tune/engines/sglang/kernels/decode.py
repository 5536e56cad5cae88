"""Which kernel attends in decode graphs over a bf16 pool: SGLang's fa3, or nsa-tune's.

A decode graph keeps the kernels that it was captured with. So both are timed before anything is
captured, and each captured size gets the faster one. Passes without a graph stay SGLang's.

Read in SGLang 0.5.17, 0.5.18 and 0.5.23, layers/attention/dsa_backend.py (`forward_decode`,
`_forward_fa3`): each row is a sequence of one query, whose page table names the selected slots, -1
behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nsa_tune.engines.sglang.eligible import Engine
from nsa_tune.engines.sglang.kernels.swap import Call, KernelSwap, current_device, is_captured
from nsa_tune.engines.sglang.switch import Part

_ROWS = (1, 2, 4, 8, 16, 32)
"""Rows that are measured. More are never faster: the selection is split among fewer programs."""
_SLOTS = 65536


@dataclass(frozen=True, slots=True)
class DecodeCall:
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
    def of(cls, named: Mapping[str, Any]) -> DecodeCall | None:
        """The call with these keyword arguments; None for one that the kernel cannot answer."""
        import torch

        q, q_rope, pool = named["q_nope"], named["q_rope"], named["kv_cache"]
        slots = named["page_table"]
        one_query_a_row = (
            named["max_seqlen_q"] == 1 and named["page_size"] == 1 and len(slots) == len(q)
        )
        read_as_is = (
            all(tensor.dtype is torch.bfloat16 for tensor in (q, q_rope, pool))
            and slots.dtype is torch.int32
            and slots.is_contiguous()
            and pool.is_contiguous()
            and q.stride(-1) == q_rope.stride(-1) == 1
        )
        if not one_query_a_row or not read_as_is or named["logit_cap"]:
            return None
        return cls(q, q_rope, pool.view(-1, pool.shape[-1]), slots, named["sm_scale"])


def around_fa3(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_fa3`, which SGLang calls by keywords."""
    if rest or not DECODE.is_on(backend):
        return original(backend, *rest, **named)
    attended = DECODE.run(_attended, backend, named)
    return original(backend, **named) if attended is None else attended


def _attended(backend: Any, named: Mapping[str, Any]) -> Any:
    call = DecodeCall.of(named)
    if call is None or not DECODE.takes((call.rows,), backend):
        return None
    return call.attended() if is_captured() else None


def decodes(engine: Engine) -> Iterator[Call]:
    """A layer's calls with so many sequences, each with as many keys as are ever selected."""
    backend = engine.backend
    original = type(backend)._forward_fa3.__wrapped__
    for rows in _ROWS:
        named = _made_up(backend, rows)
        call = DecodeCall.of(named)
        if call is None:
            raise RuntimeError("nsa-tune's decode kernel cannot take a call of this engine")
        yield Call((rows,), partial(original, backend, **named), call.attended)


def _made_up(backend: Any, rows: int) -> dict[str, Any]:
    import torch

    device = current_device()
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


DECODE = KernelSwap(
    "decode", Part.DECODE, "attends in decode graphs", ("rows",), decodes,
    # bf16 leaves 0.003 to 0.008.
    tolerance=0.02, captured=True, owner_of=lambda engine: engine.backend,
)  # fmt: skip
