"""The arms of dense prefill: expanded MHA over all keys or in chunks, and absorbed MLA."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla import limits as flash_mla
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import dense_mla, limits
from nsa_tune.backend.points.dense_prefill import features
from nsa_tune.backend.points.prefill import features as expanded
from nsa_tune.backend.points.prefill import mha
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm

_BF16 = frozenset({KVLayout.BF16})
_HOPPER = frozenset({"sm90"})
_BLACKWELL = frozenset({"sm100", "sm103"})
_WHOLE = (limits.SOME_ROWS, limits.CHUNK_CAPACITY, limits.NOT_CAPTURED)
_MERGED = (limits.SOME_ROWS, limits.SOME_PREFIX, limits.NOT_CAPTURED)

MHA = (
    Arm(
        "mha/sgl_fa3", mha.build_sgl_fa3, _BF16, "sglang_kernel", _HOPPER,
        (*_WHOLE, sglang_kernel.FA3_VARLEN_SHAPE), features=features.SGL_FA3,
    ),
    Arm(
        "mha/sgl_fa3_merged", mha.build_sgl_fa3_merged, _BF16, "sglang_kernel", _HOPPER,
        (*_MERGED, sglang_kernel.FA3_VARLEN_SHAPE), features=features.SGL_FA3,
    ),
    Arm(
        "mha/fa3", mha.build_fa3, _BF16, "flashinfer", _HOPPER,
        (*_WHOLE, flashinfer.RAGGED_SHAPE, flashinfer.FA3_WORKS),
        features=features.FLASHINFER_FA3,
    ),
    Arm(
        "mha/fa2", mha.build_fa2, _BF16, "flashinfer", ANY_GPU,
        (*_WHOLE, flashinfer.RAGGED_SHAPE, flashinfer.FA2_WORKS), features=expanded.OF_FA2,
    ),
    Arm(
        "mha/trtllm_ragged", mha.build_trtllm_ragged, _BF16, "flashinfer", _BLACKWELL,
        (*_WHOLE, flashinfer.RAGGED_SHAPE, flashinfer.TRTLLM_RAGGED_WORKSPACE),
        features=expanded.OF_FA3,
    ),
    Arm("mha/torch", mha.build_torch, _BF16, guards=_WHOLE, reference=True,
        features=expanded.OF_SDPA),
)  # fmt: skip
MLA = (
    Arm(
        "mla/fa3", dense_mla.build_fa3, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_ABSORBED), features=features.OF_FA3,
    ),
    Arm(
        "mla/fa3_paged", dense_mla.build_fa3_paged, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_ABSORBED), features=features.OF_FA3,
    ),
    Arm(
        "mla/flashmla", dense_mla.build_flashmla, _BF16, "flash_mla", _HOPPER,
        (limits.SOME_ROWS, limits.EQUAL_QUERIES, *flash_mla.DENSE_DECODE),
        features=features.OF_FLASH_MLA, first=dense_mla.first_flashmla,
    ),
    Arm(
        "mla/flashinfer", dense_mla.build_flashinfer, _BF16, "flashinfer", ANY_GPU,
        (limits.SOME_ROWS, limits.NOT_CAPTURED, *flashinfer.MLA_WORKS),
        features=features.OF_FLASHINFER,
    ),
    Arm("mla/torch", dense_mla.build_torch, _BF16, guards=(limits.SOME_ROWS,), reference=True,
        features=features.OF_TORCH),
)  # fmt: skip
