"""Limits of the sparse kernels that SGLang compiles where they run."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads
from nsa_tune.backend.libraries.limits import (
    index_offsets,
    quarter_of_memory,
    rows_in_quarter_of_memory,
)
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting

_TRITON_HEADS = 32
_UNION = 4


def _q8_shape(setting: Setting) -> str | None:
    profile, heads = setting.profile, setting.heads
    powers = heads <= 128 and heads & (heads - 1) == 0
    if (profile.rank, profile.rope) == (512, 64) and profile.index_topk % 128 == 0 and powers:
        return None
    return (
        "SGLang's fp8 prefill kernel takes latents of 512 + 64 values, selections of a multiple of "
        f"128 keys, and up to 128 heads, a power of two; {profile.name} has {profile.rank} + "
        f"{profile.rope}, {profile.index_topk} and {heads} heads"
    )


def _q8_bytes(setting: Setting) -> Limit | None:
    profile, heads = setting.profile, padded_heads(setting.heads) or setting.heads
    # bf16 queries before they are rounded, e4m3 ones, the bf16 output, and two fp32 a head.
    row_bytes = setting.heads * 2 * profile.rank + heads * (profile.latent + 2 * profile.rank + 8)

    def gathered_bytes(batch: Batch) -> int:
        return (batch.kv_tokens + profile.index_topk) * profile.latent

    operands = rows_in_quarter_of_memory(row_bytes, "operands of the fp8 prefill kernel", setting)
    gathered = quarter_of_memory(gathered_bytes, "gathered fp8 latents", setting)
    if operands is None or gathered is None:
        return None
    return lambda batch: operands(batch) or gathered(batch)


def _triton_shape(setting: Setting) -> str | None:
    profile, heads = setting.profile, setting.heads
    if (profile.rank, profile.rope) == (512, 64) and heads <= _TRITON_HEADS:
        return None
    return (
        f"triton_sparse_mla takes latents of 512 + 64 values and up to {_TRITON_HEADS} heads; "
        f"{profile.name} has {profile.rank} + {profile.rope} and {heads} heads"
    )


def _union_rows(setting: Setting) -> Limit | str:
    heads, topk = setting.heads, setting.profile.index_topk
    if heads in (4, 8) and topk.bit_count() == 1:
        return lambda batch: None if batch.q_tokens >= _UNION else "fewer than 4 queries"
    return (
        "a union of 4 takes 4 or 8 heads and a power of two of keys; "
        f"here are {heads} heads and {topk} keys"
    )


Q8_SHAPE = Guard(
    "q8_shape", "formula",
    "SGLang 0.5.23 sparse_mla_q8kv8_prefill_sm90.py:354-376, mla_qk_prep.py:190",
    _q8_shape,
)  # fmt: skip
Q8_OFFSETS = Guard(
    "q8_offsets", "formula",
    "SGLang 0.5.17 sparse_mla_q8kv8_prefill_sm90/kernel.cuh:778 s_q_idx * stride_indices_s_q",
    lambda setting: index_offsets(
        setting,
        f"pass {(2**31 - 1) // setting.profile.index_topk}, behind which 32-bit offsets of indices "
        "overflow",
    ),
)  # fmt: skip
Q8_BYTES = Guard(
    "q8_bytes", "formula",
    "SGLang 0.5.17 dsa_backend.py:2543 q, kv with topk spare rows, out, max_logits, lse",
    _q8_bytes,
)  # fmt: skip
TRITON = (
    Guard(
        "sglang_triton_shape", "formula",
        "SGLang 0.5.23 dsa_backend.py:358 _TRITON_SPARSE_MLA_MAX_HEADS", _triton_shape,
    ),
    Guard(
        "sglang_triton_bytes", "formula",
        "SGLang 0.5.23 dsa/triton_sparse_mla_prefill.py:194 _union_dedup",
        # A row's absorbed queries and mixed latents in bf16; sorted indices with their int64
        # places, the union and its bits.
        lambda setting: rows_in_quarter_of_memory(
            setting.heads * 2 * (setting.profile.latent + setting.profile.rank)
            + 20 * setting.profile.index_topk,
            "operands of triton_sparse_mla", setting,
        ),
    ),
)  # fmt: skip
"""Of `triton_sparse`."""
UNION_ROWS = Guard(
    "sglang_union_rows", "formula", "SGLang 0.5.23 dsa_backend.py:393-402", _union_rows
)
"""Of `triton_sparse` with a union of 4."""
Q8 = (Q8_SHAPE, Q8_OFFSETS, Q8_BYTES)
"""Of `q8_prefill`."""
