"""FlashMLA's two sparse kernels behind one signature each, whoever brings them."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from nsa_tune.backend import libraries as providers

if TYPE_CHECKING:
    import torch


@cache
def _module() -> Any:
    return providers.load("flash_mla")


@cache
def _legacy_keywords(function: str) -> dict[str, bool]:
    """`use_legacy=True` where the build has that switch.

    sgl-flash-mla carries two libraries. The current one has no SM90 kernels, and on SM100 reads
    V4.1's formats only: queries of 512 and tokens of 528 or 288 bytes. Everything that is called
    here, V3.2's 576 and 656 and V4's 584 bytes, is in the legacy one, for both architectures.
    """
    parameters = inspect.signature(getattr(_module(), function)).parameters
    return {"use_legacy": True} if "use_legacy" in parameters else {}


def sparse_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    topk_length: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash_mla_sparse_fwd.

    Args:
        q: [tokens, 64 or 128, 576 or 512] bf16.
        kv: [kv tokens, 1, as wide as q] bf16.
        indices: [tokens, 1, topk] int32, -1 where empty.
        scale: softmax scale.
        topk_length: [tokens] int32, how many leading indices count.
        sink: [heads] fp32, a logit that takes part in the softmax and has no value.

    Returns:
        [tokens, heads, 512] bf16.
    """
    call = _module().flash_mla_sparse_fwd
    keywords: dict[str, Any] = dict(_legacy_keywords("flash_mla_sparse_fwd"))
    if sink is not None:
        keywords["attn_sink"] = sink
    out: torch.Tensor = call(q, kv, indices, scale, topk_length=topk_length, **keywords)[0]
    return out


def new_schedule() -> Any:
    """The schedule of one pass, empty: the first call that gets it computes it, later ones read it.

    It is bound to the shapes and values of that call, so that each batch needs its own.
    """
    return _module().get_mla_metadata()[0]


def sparse_decode(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, schedule: Any,
    **more: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """flash_mla_with_kvcache over a packed fp8 pool, or over V4's window and compressed tokens.

    SGLang gives each query a row of its own (`dsa_backend.py`, `_forward_flashmla_kv`). vLLM
    gives all queries of a mixed batch one row, and those of a decoding sequence one each
    (0.33.0 `v1/attention/backends/mla/flashmla_sparse.py:1259, 1087`).

    Args:
        q: [rows, queries a row, 64 or 128, 576 or 512] bf16.
        pool: [pages, page size, 1, 656] e4m3, or V4's [pages, page size, 1, 584] uint8 with pages
            padded to a multiple of 576 bytes.
        indices: [rows, queries a row, topk] int32 slots of the pool, -1 where empty.
        scale: softmax scale.
        schedule: of `new_schedule`.
        more: of V4, with rows of one query: `topk_length` [rows] int32, how many leading indices
            count; `extra_k_cache`, as `pool` and of any page size, `extra_indices_in_kvcache` and
            `extra_topk_length`; `attn_sink` [heads] fp32, a logit without a value.

    Returns:
        [rows, queries a row, heads, 512] bf16.
    """
    out: torch.Tensor = _module().flash_mla_with_kvcache(
        q=q, k_cache=pool, block_table=None, cache_seqlens=None, head_dim_v=512,
        tile_scheduler_metadata=schedule, num_splits=None, softmax_scale=scale,
        is_fp8_kvcache=True, indices=indices, **more,
        **_legacy_keywords("flash_mla_with_kvcache"),
    )[0]  # fmt: skip
    return out


def dense_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    schedule: Any,
) -> torch.Tensor:
    """flash_mla_with_kvcache over all tokens of a bf16 pool, causal.

    Args:
        q: [sequences, queries of each, heads, 576] bf16; a sequence's queries are its last tokens.
        pool: [pages, 64, 1, 576] bf16.
        block_table: [sequences, pages] int32.
        lengths: [sequences] int32: kv tokens of each.
        scale: softmax scale.
        schedule: of `new_schedule`.

    Returns:
        [sequences, queries of each, heads, 512] bf16.
    """
    out: torch.Tensor = _module().flash_mla_with_kvcache(
        q, pool, block_table, lengths, 512, schedule, None, scale, True,
        **_legacy_keywords("flash_mla_with_kvcache"),
    )[0]  # fmt: skip
    return out
