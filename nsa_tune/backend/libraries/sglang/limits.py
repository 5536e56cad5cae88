"""Limits of the sparse kernels that SGLang compiles where they run."""

from __future__ import annotations

from nsa_tune.backend.libraries.limits import rows_in_quarter_of_memory
from nsa_tune.backend.types.point import Guard, Limit, Setting

_TRITON_HEADS = 32
_UNION = 4


def _absorbed_bytes(setting: Setting) -> int:
    """Of a row's absorbed queries and mixed latents, in bf16."""
    return setting.heads * 2 * (setting.profile.latent + setting.profile.rank)


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


TRITON = (
    Guard(
        "sglang_triton_shape", "formula",
        "SGLang 0.5.23 dsa_backend.py:358 _TRITON_SPARSE_MLA_MAX_HEADS", _triton_shape,
    ),
    Guard(
        "sglang_triton_bytes", "formula",
        "SGLang 0.5.23 dsa/triton_sparse_mla_prefill.py:194 _union_dedup",
        # Sorted indices with their int64 places, the union and its bits.
        lambda setting: rows_in_quarter_of_memory(
            _absorbed_bytes(setting) + 20 * setting.profile.index_topk,
            "operands of triton_sparse_mla", setting,
        ),
    ),
)  # fmt: skip
"""Of `triton_sparse`."""
UNION_ROWS = Guard(
    "sglang_union_rows", "formula", "SGLang 0.5.23 dsa_backend.py:393-402", _union_rows
)
"""Of `triton_sparse` with a union of 4."""
