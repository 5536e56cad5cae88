"""Index keys out of their pages: contiguous, as DeepGEMM's ragged logits read them.

A page of the pool holds all of its keys first and all of their scales after them, whatever its
shape says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 32
"""Tokens a program."""


def gather_keys_reference(
    pool: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_keys` in plain torch, on any device."""
    pages, page_size, _, width = pool.shape
    dim, slot = width - 4, slots.long()
    flat = pool.view(pages, page_size * width)
    keys = flat[:, : page_size * dim].unflatten(1, (page_size, dim))
    scales = flat[:, page_size * dim :].unflatten(1, (page_size, 4))
    page, offset = slot // page_size, slot % page_size
    found = scales[page, offset].contiguous().view(torch.float32).flatten()
    return keys[page, offset].view(torch.float8_e4m3fn), found


@triton.jit
def _gather_kernel(
    keys, scales, slots, keys_out, scales_out, tokens,
    PAGE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    # 64-bit: a pool of 16 million tokens passes 2**31 bytes.
    slot = tl.load(slots + token, mask=here, other=0).to(tl.int64)
    page = slot // PAGE
    offset = slot % PAGE
    # In words of 4 bytes: a page has PAGE rows of DIM bytes, and then PAGE words.
    WORDS: tl.constexpr = DIM // 4
    column = tl.arange(0, WORDS)
    start = page * (PAGE * (WORDS + 1))
    source = keys + (start + offset * WORDS)[:, None] + column[None, :]
    value = tl.load(source, mask=here[:, None], other=0)
    target = keys_out + token.to(tl.int64)[:, None] * WORDS + column[None, :]
    tl.store(target, value, mask=here[:, None])
    scale = tl.load(scales + start + PAGE * WORDS + offset, mask=here, other=0.0)
    tl.store(scales_out + token, scale, mask=here)


def gather_keys(pool: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and their scales in one pass.

    As SGLang's GetKAndS (dsa/index_buf_accessor.py) and vLLM's cp_gather_indexer_k_quant_cache do
    before each layer's ragged logits.

    Args:
        pool: [pages, page size, 1, dim + 4] uint8, contiguous; dim / 4 is a power of two.
        slots: [tokens] int32: page * page size + offset of each token.

    Returns:
        [tokens, dim] e4m3 and [tokens] fp32.
    """
    tokens, (_, page_size, _, width) = slots.numel(), pool.shape
    assert pool.is_contiguous()
    keys = torch.empty(tokens, width - 4, dtype=torch.float8_e4m3fn, device=pool.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=pool.device)
    words = pool.view(-1)
    _gather_kernel[(triton.cdiv(tokens, _TOKENS),)](
        words.view(torch.int32), words.view(torch.float32), slots, keys.view(torch.int32), scales,
        tokens, PAGE=page_size, DIM=width - 4, TOKENS=_TOKENS,
    )  # fmt: skip
    return keys, scales
