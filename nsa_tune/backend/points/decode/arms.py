"""The arms that decode. A pass reads back as much at any context, so a CUDA graph can hold each."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla import limits as flash_mla
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import limits, mla
from nsa_tune.backend.points.decode import features
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, SparseArm

_BF16 = frozenset({KVLayout.BF16})
_PACKED = frozenset({KVLayout.FP8_PACKED})
_BOTH = _BF16 | _PACKED
_WIDENED = {KVLayout.FP8_PACKED: "packed_fp8.dequantize"}
_HOPPER = frozenset({"sm90"})
_BLACKWELL = frozenset({"sm100", "sm103"})

ARMS = (
    SparseArm(
        "flashmla_kv", mla.build_flashmla_kv, _PACKED, "flash_mla", flash_mla.ARCHS,
        (limits.SOME_ROWS, *flash_mla.DECODE_KERNEL), surcharge=flash_mla.schedule_surcharge,
        features=features.OF_FLASHMLA_KV, first=mla.first_flashmla_kv, copied={},
    ),
    SparseArm(
        "flashmla_kv_grouped", mla.build_flashmla_kv_grouped, _PACKED, "flash_mla",
        flash_mla.ARCHS, (limits.SOME_ROWS, limits.SEVERAL_QUERIES, *flash_mla.DECODE_KERNEL),
        features=features.OF_FLASHMLA_GROUPED, first=mla.first_flashmla_kv_grouped, copied={},
    ),
    SparseArm(
        "fa3", mla.build_fa3, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_SPARSE), features=features.OF_FA3, copied={},
    ),
    SparseArm(
        "trtllm", mla.build_trtllm, _BF16, "flashinfer", _BLACKWELL,
        (limits.SOME_ROWS, flashinfer.TRTLLM_SPARSE_SHAPE), features=features.OF_PAIRS,
        copied={},
    ),
    SparseArm(
        "flashmla_sparse", mla.build_flashmla_selected, _BOTH, "flash_mla", flash_mla.ARCHS,
        (limits.SOME_ROWS, *flash_mla.SPARSE_FWD, limits.SELECTION_BYTES),
        features=features.OF_FLASHMLA_SPARSE, copied=_WIDENED,
    ),
    SparseArm(
        "triton", mla.build_triton, _BOTH, archs=ANY_GPU,
        guards=(limits.SOME_ROWS, limits.TRITON_SHAPE, limits.TRITON_BYTES),
        features=features.OF_TRITON, copied={},
    ),
    SparseArm(
        "triton_split", mla.build_triton_split, _BF16, archs=_HOPPER,
        guards=(limits.SOME_ROWS, limits.TRITON_SHAPE, limits.FEW_ROWS),
        features=features.OF_TRITON_SPLIT, copied={},
    ),
    SparseArm(
        "torch_kv", mla.build_torch_kv, _PACKED, reference=True, features=features.OF_PAIRS,
        copied={},
    ),
    SparseArm(
        "torch_sparse", mla.build_torch_selected, _BOTH, reference=True,
        features=features.OF_PAIRS, copied=_WIDENED,
    ),
)  # fmt: skip
