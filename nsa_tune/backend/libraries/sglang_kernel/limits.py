"""sglang-kernel's limits: FlashAttention-3 over selected tokens, and top-k."""

from __future__ import annotations

from nsa_tune.backend.libraries.limits import at_most, at_most_rows
from nsa_tune.backend.types.point import Guard, Limit, Setting

_INT32 = 2**31


def _shape(setting: Setting) -> str | None:
    profile = setting.profile
    if (profile.rank, profile.rope) == (512, 64) and setting.heads <= 128:
        return None
    return (
        "FlashAttention-3 with absorbed queries is built for latents of 512 + 64 values and up to "
        f"128 heads, {profile.name} has {profile.rank} + {profile.rope} and {setting.heads} heads"
    )


def _offsets(setting: Setting) -> Limit:
    most = (_INT32 - 1) // max(setting.profile.index_topk, setting.heads * setting.profile.rank)
    why = f"pass {most}, behind which offsets of a page table or output overflow"
    return at_most_rows(most, why)


FA3_SPARSE_SHAPE = Guard(
    "fa3_sparse_shape", "formula", "sglang-kernel 0.4.5 flash_ops: hdim 64, v 512, sm90 bf16 only",
    _shape,
)  # fmt: skip
FA3_SPARSE_OFFSETS = Guard(
    "fa3_sparse_offsets", "formula", "sglang-kernel 0.4.5 flash_ops: int32 page table and strides",
    _offsets,
)  # fmt: skip
FA3_SPARSE = (FA3_SPARSE_SHAPE, FA3_SPARSE_OFFSETS)
"""Of `fa3_sparse`."""


def _varlen_shape(setting: Setting) -> str | None:
    profile = setting.profile
    widths = (profile.nope + profile.rope, profile.v)
    if widths in {(192, 128), (256, 256), (128, 128), (64, 64)}:
        return None
    return f"FlashAttention-3 has no kernels for head widths {widths}"


def _absorbed_offsets(setting: Setting) -> Limit:
    most = (_INT32 - 1) // (setting.heads * setting.profile.rank)
    output = at_most_rows(most, f"pass {most}, behind which offsets of the output overflow")
    table = at_most(
        _INT32 - 1, lambda batch: batch.batch_size * batch.max_kv,
        lambda entries: f"a page table of {entries} entries passes int32 offsets",
    )  # fmt: skip
    return lambda batch: output(batch) or table(batch)


FA3_VARLEN_SHAPE = Guard(
    "fa3_varlen_shape", "formula", "sglang-kernel 0.4.10 flash_ops: hdim 192, v 128 and equal ones",
    _varlen_shape,
)  # fmt: skip
FA3_ABSORBED = (
    FA3_SPARSE_SHAPE,
    Guard(
        "fa3_absorbed_offsets", "formula",
        "sglang-kernel 0.4.10 flash_ops: int32 page table and strides", _absorbed_offsets,
    ),
)  # fmt: skip
"""Of `fa3_absorbed`."""

TOPK = 2048
"""The only count that the top-k kernels take."""


TOPK_COUNT = Guard(
    "topk_2048", "formula", "sglang-kernel sgl_kernel/top_k.py: an assertion in each call",
    lambda setting: (
        None
        if setting.profile.index_topk == TOPK
        else f"fast_topk_v2 selects {TOPK} scores, not {setting.profile.index_topk}"
    ),
)  # fmt: skip
