"""The arms that decode over all tokens."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla import limits as flash_mla
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import dense_mla, limits
from nsa_tune.backend.points.dense_decode import features
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm

_BF16 = frozenset({KVLayout.BF16})
_HOPPER = frozenset({"sm90"})

ARMS = (
    Arm(
        "fa3", dense_mla.build_fa3, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_ABSORBED), features=features.OF_FA3,
    ),
    Arm(
        "fa3_paged", dense_mla.build_fa3_paged, _BF16, "sglang_kernel", _HOPPER,
        (limits.SOME_ROWS, *sglang_kernel.FA3_ABSORBED), features=features.OF_FA3,
    ),
    Arm(
        "flashmla", dense_mla.build_flashmla, _BF16, "flash_mla", _HOPPER,
        (limits.SOME_ROWS, *flash_mla.DENSE_DECODE), features=features.OF_FLASH_MLA,
        first=dense_mla.first_flashmla,
    ),
    Arm(
        "flashinfer", dense_mla.build_flashinfer, _BF16, "flashinfer", ANY_GPU,
        (limits.SOME_ROWS, *flashinfer.MLA_WORKS), features=features.OF_FLASHINFER,
    ),
    Arm(
        "triton", dense_mla.build_triton, _BF16, "sglang_triton_decode", ANY_GPU,
        (limits.SOME_ROWS, limits.ONE_QUERY), features=features.OF_TRITON,
    ),
    Arm("torch", dense_mla.build_torch, _BF16, guards=(limits.SOME_ROWS,), reference=True,
        features=features.OF_TORCH),
)  # fmt: skip
