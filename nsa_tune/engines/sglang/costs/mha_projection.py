"""What SGLang runs in a layer of dense MHA besides what the arms `mha/...` hold.

The arms project latents by bf16 weights, and FlashInfer plans its attention once a pass. SGLang
quantizes the latents for its fp8 weights, and prepares FlashAttention-3 in every layer. What it has
read back from an fp8 pool it copies once more (forward_mha.py, `.contiguous()`). Microseconds of
these kernels in 24 prefills of an H200, by PyTorch's profiler.
"""

from __future__ import annotations

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout

_PREPARE_US = 2.9
_QUANTIZE_US, _QUANTIZE_TOKEN_US = 1.2, 0.00025
_COPY_US, _COPY_TOKEN_US = 1.6, 0.0009


def mha_projection_us(batch: Batch, layout: KVLayout) -> float:
    """Microseconds that a layer of dense MHA over `batch` takes longer than its arm."""
    us = _PREPARE_US + _QUANTIZE_US + _QUANTIZE_TOKEN_US * batch.kv_tokens
    if batch.prefix_tokens and layout is KVLayout.FP8_PACKED:
        us += _COPY_US + _COPY_TOKEN_US * batch.kv_tokens
    return us
