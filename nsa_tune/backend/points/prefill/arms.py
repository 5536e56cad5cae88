"""The arms of prefill: expanded MHA by `mha`, absorbed MLA by `mla`."""

from __future__ import annotations

from functools import partial

from nsa_tune.backend.libraries.flash_mla import limits as flash_mla
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang import limits as sglang
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import limits, mla
from nsa_tune.backend.points.prefill import features, mha
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm, SparseArm

_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
_BF16 = frozenset({KVLayout.BF16})
_PACKED = frozenset({KVLayout.FP8_PACKED})
_WIDENED = {KVLayout.FP8_PACKED: "packed_fp8.dequantize"}
_NARROWED = {KVLayout.FP8_PACKED: "packed_fp8.narrow"}
_HOPPER = frozenset({"sm90"})
_BLACKWELL = frozenset({"sm100", "sm103"})
_HOPPER_ON = _HOPPER | _BLACKWELL | frozenset({"sm120", "sm121"})
_DENSE = (limits.SOME_ROWS, limits.DENSE_EXACT, limits.CHUNK_CAPACITY, limits.NOT_CAPTURED)

_FP8_TOLERANCE = 0.12
"""Relative error that rounding q, keys, values and weights to e4m3 may leave."""
_FP8_LOSS = (
    "rounds q, keys, values and softmax weights to e4m3 (3 mantissa bits) with scales of 1: what "
    "lies beyond 448 is cut off"
)

MHA = (
    Arm(
        "mha/fa3", mha.build_fa3, _ANY, "flashinfer", _HOPPER,
        (*_DENSE, flashinfer.RAGGED_SHAPE, flashinfer.FA3_WORKS), features=features.OF_FA3,
    ),
    # How TRT-LLM deals out tiles is not known: as if it were like FlashInfer's FlashAttention-3.
    Arm(
        "mha/trtllm_ragged", mha.build_trtllm_ragged, _ANY, "flashinfer", _BLACKWELL,
        (*_DENSE, flashinfer.RAGGED_SHAPE, flashinfer.TRTLLM_RAGGED_WORKSPACE),
        features=features.OF_FA3,
    ),
    Arm(
        "mha/fa2", mha.build_fa2, _ANY, "flashinfer", ANY_GPU,
        (*_DENSE, flashinfer.RAGGED_SHAPE, flashinfer.FA2_WORKS), features=features.OF_FA2,
    ),
    Arm(
        "mha/fa3_merged", mha.build_fa3_merged, _ANY, "flashinfer", _HOPPER,
        (*_DENSE, limits.SOME_PREFIX, flashinfer.RAGGED_SHAPE, flashinfer.FA3_WORKS),
        features=features.OF_FA3,
    ),
    Arm("mha/sdpa", mha.build_torch, _ANY, archs=ANY_GPU, guards=_DENSE, features=features.OF_SDPA),
    Arm(
        "mha/torch", mha.build_torch, _ANY, guards=_DENSE, reference=True,
        features=features.OF_SDPA,
    ),
)  # fmt: skip
MLA = (
    SparseArm(
        "mla/flashmla_sparse", mla.build_flashmla_sparse, _ANY, "flash_mla", flash_mla.ARCHS,
        (limits.SOME_ROWS, *flash_mla.SPARSE_FWD, flash_mla.WIDENED_BYTES),
        features=features.OF_FLASHMLA_SPARSE, copied=_WIDENED,
    ),
    SparseArm(
        "mla/flashmla_kv", mla.build_flashmla_kv, _PACKED, "flash_mla", flash_mla.ARCHS,
        (limits.SOME_ROWS, *flash_mla.DECODE_KERNEL),
        surcharge=flash_mla.schedule_surcharge, features=features.OF_FLASHMLA_KV,
        first=mla.first_flashmla_kv, copied={},
    ),
    SparseArm(
        "mla/flashmla_kv_mixed", mla.build_flashmla_kv_mixed, _PACKED, "flash_mla",
        flash_mla.ARCHS, (limits.SOME_ROWS, *flash_mla.MIXED_KERNEL),
        features=features.OF_FLASHMLA_MIXED, first=mla.first_flashmla_kv_mixed, copied={},
    ),
    SparseArm(
        "mla/fa3", mla.build_fa3, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_SPARSE), features=features.OF_SPARSE_FA3, copied={},
    ),
    SparseArm(
        "mla/triton_sparse_mla", mla.build_sglang_triton, _ANY, "sglang_triton", _HOPPER_ON,
        (limits.SOME_ROWS, *sglang.TRITON, flash_mla.WIDENED_BYTES), features=features.OF_TRITON,
        copied=_WIDENED,
    ),
    # A union of 2 queries loses to this or to fa3 at every overlap (benchmarks/results).
    SparseArm(
        "mla/triton_sparse_mla_union4", partial(mla.build_sglang_triton, union=4), _ANY,
        "sglang_triton", _HOPPER_ON,
        (limits.SOME_ROWS, *sglang.TRITON, sglang.UNION_ROWS, flash_mla.WIDENED_BYTES),
        features=features.OF_UNION, copied=_WIDENED,
    ),
    SparseArm(
        "mla/flashmla_sparse_q8", mla.build_flashmla_sparse_q8, _PACKED, "sglang_q8", _HOPPER,
        (limits.SOME_ROWS, *sglang.Q8), features=features.OF_MLA, loss=_FP8_LOSS,
        tolerance=_FP8_TOLERANCE, copied=_NARROWED,
    ),
    SparseArm(
        # Not where FlashMLA runs: so many times slower there that a sweep would be mostly its time.
        "mla/triton", mla.build_triton, _ANY, archs=ANY_GPU - flash_mla.ARCHS,
        guards=(limits.SOME_ROWS, limits.TRITON_SHAPE, limits.TRITON_BYTES),
        features=features.OF_MLA, copied={},
    ),
    SparseArm(
        "mla/torch_sparse", mla.build_torch_sparse, _ANY, reference=True,
        features=features.OF_MLA, copied=_WIDENED,
    ),
    SparseArm(
        "mla/torch_kv", mla.build_torch_kv, _PACKED, reference=True, features=features.OF_MLA,
        copied={},
    ),
    SparseArm(
        "mla/torch_sparse_q8", mla.build_torch_sparse_q8, _PACKED, reference=True,
        features=features.OF_MLA, loss=_FP8_LOSS, tolerance=_FP8_TOLERANCE, copied=_NARROWED,
    ),
)  # fmt: skip
