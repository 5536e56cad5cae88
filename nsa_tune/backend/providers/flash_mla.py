"""FlashMLA's two sparse kernels behind one signature each, whoever brings them."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from nsa_tune.backend import providers

if TYPE_CHECKING:
    import torch

__all__ = ["sparse_decode", "sparse_forward"]


@cache
def _module() -> Any:
    return providers.load("flash_mla")


@cache
def _legacy_keywords(function: str, major: int) -> dict[str, bool]:
    """`use_legacy=True` where the build has that switch and the GPU is a Hopper.

    sgl-flash-mla carries two libraries; the current one has no SM90 kernels and raises there.
    """
    parameters = inspect.signature(getattr(_module(), function)).parameters
    return {"use_legacy": True} if major == 9 and "use_legacy" in parameters else {}


def _major(tensor: torch.Tensor) -> int:
    import torch

    return torch.cuda.get_device_capability(tensor.device)[0]


def sparse_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    topk_length: torch.Tensor | None,
) -> torch.Tensor:
    """flash_mla_sparse_fwd.

    Args:
        q: [tokens, 64 or 128, 576] bf16.
        kv: [kv tokens, 1, 576] bf16.
        indices: [tokens, 1, topk] int32, -1 where empty.
        scale: softmax scale.
        topk_length: [tokens] int32, how many leading indices count.

    Returns:
        [tokens, heads, 512] bf16.
    """
    call = _module().flash_mla_sparse_fwd
    keywords = _legacy_keywords("flash_mla_sparse_fwd", _major(q))
    out: torch.Tensor = call(q, kv, indices, scale, topk_length=topk_length, **keywords)[0]
    return out


def sparse_decode(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float
) -> torch.Tensor:
    """flash_mla_with_kvcache over a packed fp8 pool, its schedule computed anew.

    Args:
        q: [rows, 1, 64 or 128, 576] bf16.
        pool: [pages, page size, 1, 656] e4m3.
        indices: [rows, 1, topk] int32 slots of the pool, -1 where empty.
        scale: softmax scale.

    Returns:
        [rows, 1, heads, 512] bf16.
    """
    module = _module()
    call = module.flash_mla_with_kvcache
    # A schedule is bound to its first call's shapes and values, so each call gets a fresh one.
    schedule, _ = module.get_mla_metadata()
    out: torch.Tensor = call(
        q=q,
        k_cache=pool,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=schedule,
        num_splits=None,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=indices,
        **_legacy_keywords("flash_mla_with_kvcache", _major(q)),
    )[0]
    return out
