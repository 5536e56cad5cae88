"""What SGLang copies around its attention kernels in a prefill, copied in less time.

Two copies: the prefix, read back as bf16 from an fp8 pool, and queries of few heads, padded to the
64 that FlashMLA's sparse kernel takes. Both must give SGLang's bits. SGLang reads a prefix back by
a function, not by a method, so that what is taken is known for the process: an engine's process has
one model and one layout of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from nsa_tune.engines.sglang.eligible import PADDED_HEADS, Engine, pads, reads_back
from nsa_tune.engines.sglang.kernels.swap import Call, KernelSwap, current_device, is_captured
from nsa_tune.engines.sglang.switch import Part
from nsa_tune.engines.symbols import hooks_on

RANK, ROPE, BYTES = 512, 64, 656
"""A token of DeepSeek V3.2: numbers of its latent and its rope, bytes in a packed fp8 pool."""
_TILES = 4
_TOKENS = (512, 2048, 8192, 32768, 65536)
_ROWS = (64, 256, 1024, 2048)
_KEYS = 4096
_POOL_AND_SLOTS = 2
"""How many arguments SGLang gives the function that reads a prefix back."""


def read_back(pool: Any, slots: Any, count: Any = None) -> Any:
    """Gather tokens of SGLang's packed fp8 pool, widened to bf16: bit by bit as SGLang does it.

    Args:
        pool: [..., 656] float8_e4m3fn, contiguous.
        slots: [tokens] int32 or int64: places in the pool.
        count: int32 [1] on the GPU: how many of them are read; None for all.

    Returns:
        [tokens, 1, 576] bf16; None for other tensors.
    """
    import torch

    from nsa_tune.backend.kernels import packed_fp8

    if not (
        pool.dtype is torch.float8_e4m3fn
        and pool.shape[-1] == BYTES
        and pool.is_contiguous()
        and slots.ndim == 1
        and slots.dtype in (torch.int32, torch.int64)
        and slots.is_contiguous()
    ):
        return None
    raw = pool.view(-1, BYTES).view(torch.uint8)
    return packed_fp8.dequantize(raw, slots, RANK, ROPE, count).unsqueeze(1)


def padded(q: Any, heads: int) -> Any:
    """Queries with more heads, whose values are whatever the memory held.

    SGLang writes zeros there. A head's output depends on its own queries alone, and the outputs of
    these heads are cut off.

    Args:
        q: [tokens, own heads, latent] bf16, contiguous; latent is a multiple of 4.
        heads: how many heads the result has.

    Returns:
        [tokens, heads, latent] bf16; None for other tensors.
    """
    import torch

    if not (q.ndim == 3 and q.dtype is torch.bfloat16 and q.is_contiguous() and not q.shape[2] % 4):
        return None
    out = q.new_empty((q.shape[0], heads, q.shape[2]))
    # Four values at a time: torch copies a slice of 64-bit numbers as fast as the memory goes.
    out.view(torch.int64)[:, : q.shape[1]].copy_(q.view(torch.int64))
    return out


def around_read_back(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The hook around `dequantize_k_cache_paged`, which SGLang calls with pool and slots."""
    if named or len(given) != _POOL_AND_SLOTS:
        return original(*given, **named)
    if not READ_BACK.takes((given[1].shape[0],)) or is_captured():
        return original(*given)
    latents = READ_BACK.run(read_back, *given)
    return original(*given) if latents is None else latents


def around_sparse(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_flashmla_sparse`, which SGLang calls by keywords."""
    q = named.get("q_all")
    if rest or q is None or not _is_padded(q, named) or is_captured():
        return original(backend, *rest, **named)
    wider = PADDING.run(padded, q, PADDED_HEADS)
    if wider is None:
        return original(backend, **named)
    return original(backend, **{**named, "q_all": wider})[:, : q.shape[1]]


def _is_padded(q: Any, named: dict[str, Any]) -> bool:
    # Sinks are padded to the queries' heads too.
    few = q.shape[1] < PADDED_HEADS and named.get("attn_sink") is None
    return few and PADDING.takes((q.shape[0],))


def read_backs(engine: Engine) -> Iterator[Call]:
    """Reading a prefix back from a made-up pool."""
    import torch

    function = _function(engine.backend)
    assert function is not None, "it applies only where that is hooked"
    device = current_device()
    pool = made_up_pool(max(_TOKENS), device)
    for tokens in _TOKENS:
        slots = torch.randperm(len(pool), device=device)[:tokens].int()
        yield Call((tokens,), partial(function, pool, slots), partial(read_back, pool, slots))


def paddings(engine: Engine) -> Iterator[Call]:
    """Sparse attention with both ways of padding, compared with NaN behind the queries."""
    import torch

    backend, device = engine.backend, current_device()
    original = type(backend)._forward_flashmla_sparse.__wrapped__
    heads, topk = int(backend.num_q_heads), int(backend.dsa_index_topk)
    latents = torch.randn(_KEYS, 1, RANK + ROPE, device=device).bfloat16()
    for rows in _ROWS:
        q = torch.randn(rows, heads, RANK + ROPE, device=device).bfloat16()
        attend = partial(
            original, backend,
            kv_cache=latents, v_head_dim=RANK, sm_scale=(RANK + ROPE) ** -0.5,
            page_table_1=torch.randint(_KEYS, (rows, topk), dtype=torch.int32, device=device),
            topk_length=torch.full((rows,), topk, dtype=torch.int32, device=device),
        )  # fmt: skip

        def with_nan(q: Any = q, attend: Callable[..., Any] = attend) -> Any:
            wider = padded(q, PADDED_HEADS)
            wider[:, heads:] = float("nan")
            return attend(q_all=wider)[:, :heads]

        def swapped(q: Any = q, attend: Callable[..., Any] = attend) -> Any:
            return attend(q_all=padded(q, PADDED_HEADS))

        yield Call((rows,), partial(attend, q_all=q), swapped, compared=with_nan)


def _function(backend: Any) -> Callable[..., Any] | None:
    """SGLang's own function that reads a prefix back; None where it is not hooked."""
    module = import_module(type(backend).__module__)
    for name in ("dequantize_k_cache_paged", "dequantize_k_cache_paged_dsa"):
        function: Any = getattr(module, name, None)
        if hooks_on(function):
            original: Callable[..., Any] = function.__wrapped__
            return original
    return None


def made_up_pool(tokens: int, device: Any) -> Any:
    """[tokens, 1, 656] float8_e4m3fn: any values but NaN, scales and rotary parts."""
    import torch

    values = torch.randn(tokens, RANK, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(tokens, _TILES, device=device) + 0.5
    rope = torch.randn(tokens, ROPE, device=device).bfloat16()
    pool = torch.cat([part.view(torch.uint8) for part in (values, scales, rope)], dim=1)
    assert pool.shape[1] == BYTES
    return pool.view(torch.float8_e4m3fn).unsqueeze(1)


READ_BACK = KernelSwap(
    "read_back", Part.COPIES, "reads prefixes back", ("tokens",), read_backs, margin=0.02,
    applies=lambda engine: reads_back(engine.backend) and _function(engine.backend) is not None,
)  # fmt: skip
PADDING = KernelSwap(
    "padding", Part.COPIES, "pads queries", ("rows",), paddings, margin=0.02,
    applies=lambda engine: pads(engine.backend),
)  # fmt: skip
