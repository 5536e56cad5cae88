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
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """FlashAttention-3's paged decode: pages of one token, and the selection as the page table.

    SGLang's default decode over a bf16 pool on Hopper, and its bf16 prefill when asked for "fa3":
    `dsa_backend.py:2737` (`_forward_fa3`), which calls `sgl_kernel/flash_attn.py`
    (`flash_attn_with_kvcache`). Each row is a sequence of one query. SM90 only, bf16 only.

    Args:
        q_nope: [rows, heads, 512] bf16: absorbed queries, last dimension contiguous.
        q_rope: [rows, heads, 64] bf16, last dimension contiguous.
        pool: [slots, 576] bf16: latents, then rope.
        indices: [rows, topk] int32 slots of the pool, the valid ones first. Unlike FlashMLA's they
            are read unchecked: -1 is harmless beyond a row's length only.
        lengths: [rows] int32, how many leading indices count.
        starts: [rows + 1] int32, 0 to rows, which SGLang makes once a pass.
        scale: softmax scale; the library's own default would be that of 576 wide heads.

    Returns:
        [rows, heads, 512] bf16.
    """
    rank = q_nope.shape[-1]
    out: torch.Tensor = _module("sgl_kernel.flash_attn").flash_attn_with_kvcache(
        q=q_rope, qv=q_nope, k_cache=pool[:, None, None, rank:],
        v_cache=pool[:, None, None, :rank], page_table=indices, cache_seqlens=lengths,
        cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=scale, num_splits=0, causal=True,
    )  # fmt: skip
    return out


def fa3_varlen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts_q: torch.Tensor,
    starts_kv: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_varlen_func: dense attention of ragged sequences, as SGLang expands V3's prefills
    (`layers/attention/flashattention_backend.py`).

    Args:
        q: [q tokens, heads, 192] bf16.
        keys: [kv tokens, heads, 192] bf16.
        values: [kv tokens, heads, 128] bf16, last dimension contiguous.
        starts_q: [sequences + 1] int32: first query of each sequence.
        starts_kv: [sequences + 1] int32: first kv token of each sequence.
        longest: most queries and most kv tokens of a sequence.
        scale: softmax scale.
        causal: whether a sequence's queries are its last tokens, and see those up to their own.

    Returns:
        [q tokens, heads, 128] bf16, and the natural logarithm of the sum of each row's exponents,
        [heads, q tokens] fp32.
    """
    out: torch.Tensor
    lse: torch.Tensor
    out, lse, *_ = _module("sgl_kernel.flash_attn").flash_attn_varlen_func(
        q, keys, values, starts_q, starts_kv, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
        softmax_scale=scale, causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    return out, lse


def fa3_absorbed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    starts_q: torch.Tensor,
    longest_q: int,
    scale: float,
) -> torch.Tensor:
    """flash_attn_with_kvcache with `qv`: absorbed attention over a paged pool, causal, as SGLang
    decodes V3 and prefills it in a graph (`layers/attention/flashattention_backend.py`).

    Args:
        q_nope: [q tokens, heads, 512] bf16: absorbed queries, last dimension contiguous.
        q_rope: [q tokens, heads, 64] bf16, last dimension contiguous.
        pool: [pages, page size, 576] bf16: latents, then rope.
        page_table: [sequences, pages] int32.
        lengths: [sequences] int32: kv tokens of each.
        starts_q: [sequences + 1] int32: first query of each sequence, which are its last tokens.
        longest_q: most queries of a sequence.
        scale: softmax scale; the library's own default would be that of 576 wide heads.

    Returns:
        [q tokens, heads, 512] bf16.
    """
    rank = q_nope.shape[-1]
    out: torch.Tensor = _module("sgl_kernel.flash_attn").flash_attn_with_kvcache(
        q=q_rope, qv=q_nope, k_cache=pool[:, :, None, rank:], v_cache=pool[:, :, None, :rank],
        page_table=page_table, cache_seqlens=lengths, cu_seqlens_q=starts_q,
        max_seqlen_q=longest_q, softmax_scale=scale, causal=True,
    )  # fmt: skip
    return out


def topk(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """fast_topk_v2: the 2048 largest scores of each row, as places in the row.

    `dsa/dsa_topk_backend.py:66` calls `sgl_kernel/top_k.py`; the kernel is
    `sgl-kernel/csrc/elementwise/topk.cu`. Not exact: of the scores that share the top 8 bits of
    their fp16 value with the 2048th largest, those beyond the first few thousand are dropped.

    Args:
        scores: [rows, columns] fp32, last dimension contiguous.
        lengths: [rows] int32, contiguous: how many scores of a row count. Read unchecked.

    Returns:
        [rows, 2048] int32, in no order; -1 beyond a row's length.
    """
    out: torch.Tensor = _module("sgl_kernel.top_k").fast_topk_v2(scores, lengths, TOPK, None)
    return out
