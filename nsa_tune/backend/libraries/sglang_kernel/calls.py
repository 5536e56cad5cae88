"""sglang-kernel's FlashAttention-3 over selected tokens, and its top-k kernel.

Read in sglang-kernel 0.4.5 (`sgl_kernel/`) and in SGLang 0.5.23 (`sglang/srt/layers/attention/`).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from nsa_tune.backend import libraries as providers
from nsa_tune.backend.libraries.sglang_kernel.limits import TOPK

if TYPE_CHECKING:
    import torch


@cache
def _module(name: str) -> Any:
    providers.load("sglang_kernel")
    return importlib.import_module(name)


def fa3_sparse(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    scale: float,
    splits: int = 0,
) -> torch.Tensor:
    """FlashAttention-3's paged decode: pages of one token, and the selection as the page table.

    SGLang's default decode over a bf16 pool on Hopper, and its bf16 prefill when asked for "fa3":
    `dsa_backend.py:2737` (`_forward_fa3`), which calls `sgl_kernel/flash_attn.py`
    (`flash_attn_with_kvcache`). Each row is a sequence of one query. SM90 only, bf16 only.

    Without `lengths` every row attends to its whole selection, and the kernel that schedules rows
    of unequal length is not launched: 3 to 6 us less at 1 to 64 rows on an H200. SGLang does not.

    Args:
        q_nope: [rows, heads, 512] bf16: absorbed queries, last dimension contiguous.
        q_rope: [rows, heads, 64] bf16, last dimension contiguous.
        pool: [slots, 576] bf16: latents, then rope.
        indices: [rows, topk] int32 slots of the pool, the valid ones first. Unlike FlashMLA's they
            are read unchecked: -1 is harmless beyond a row's length only.
        lengths: [rows] int32, how many leading indices count; or None.
        starts: [rows + 1] int32, 0 to rows, which SGLang makes once a pass; with `lengths` only.
        scale: softmax scale; the library's own default would be that of 576 wide heads.
        splits: parts of a row's selection, at most 256; 0 lets the library choose.

    Returns:
        [rows, heads, 512] bf16.
    """
    rank = q_nope.shape[-1]
    call = _module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    keys = {"k_cache": pool[:, None, None, rank:], "v_cache": pool[:, None, None, :rank]}
    shared = {**keys, "page_table": indices, "softmax_scale": scale, "num_splits": splits}
    out: torch.Tensor
    if lengths is None:
        out = call(q=q_rope[:, None], qv=q_nope[:, None], causal=True, **shared)
        return out[:, 0]
    out = call(
        q=q_rope,
        qv=q_nope,
        cache_seqlens=lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        causal=True,
        **shared,
    )
    return out


def topk(
    scores: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """fast_topk_v2: the 2048 largest scores of each row, as places in the row.

    `dsa/dsa_topk_backend.py:66` calls `sgl_kernel/top_k.py`; the kernel is
    `sgl-kernel/csrc/elementwise/topk.cu`. Not exact: of the scores that share the top 8 bits of
    their fp16 value with the 2048th largest, those beyond the first few thousand are dropped.

    Args:
        scores: [rows, columns] fp32, last dimension contiguous.
        lengths: [rows] int32, contiguous: how many scores of a row count. Read unchecked.
        row_starts: [rows] int32, the first column that counts; None for 0.

    Returns:
        [rows, 2048] int32 relative to `row_starts`, in no order; -1 beyond a row's length.
    """
    out: torch.Tensor = _module("sgl_kernel.top_k").fast_topk_v2(scores, lengths, TOPK, row_starts)
    return out
