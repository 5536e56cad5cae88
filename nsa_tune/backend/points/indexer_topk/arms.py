"""The kernels that select the largest scores of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsa_tune.backend.libraries.deep_gemm import limits as deep_gemm
from nsa_tune.backend.libraries.flashinfer import limits as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import limits as sglang_kernel
from nsa_tune.backend.points import limits
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_topk.case import TopkCase


def _build_sglang(case: TopkCase) -> Callable[[], torch.Tensor]:
    """fast_topk_v2, SGLang's default."""
    from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel

    layers = case.layers()
    return lambda: sglang_kernel.topk(next(layers), case.lengths)


def _build_sglang_v2(case: TopkCase) -> Callable[[], torch.Tensor]:
    """topk_transform_ragged_v2, SGLang's in ragged prefills. Its first call compiles."""
    from nsa_tune.backend.libraries.sglang import calls as sglang

    layers, offsets = case.layers(padded=True), case.lengths.new_zeros(case.batch.q_tokens)
    return lambda: sglang.topk_v2(next(layers), case.lengths, offsets, case.topk)


def _build_flashinfer(case: TopkCase) -> Callable[[], torch.Tensor]:
    """top_k_ragged_transform over whole padded rows, which lie one behind the other."""
    from nsa_tune.backend.libraries.flashinfer import calls as flashinfer

    layers, offsets = case.layers(padded=True), case.lengths.new_zeros(case.batch.q_tokens)
    return lambda: flashinfer.topk(next(layers), case.lengths, offsets, case.topk)


def _build_sampled(case: TopkCase) -> Callable[[], torch.Tensor]:
    """nsa-tune's own kernel. Its first call compiles."""
    from nsa_tune.backend.kernels.sampled_topk import sampled_topk

    layers = case.layers()
    return lambda: sampled_topk(next(layers), case.lengths, case.topk)


def _build_torch(case: TopkCase) -> Callable[[], torch.Tensor]:
    """torch.topk over rows whose ends are masked out."""
    from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference

    layers = case.layers()
    return lambda: sampled_topk_reference(next(layers), case.lengths, case.topk)


# Scores are of the indexer's keys, whatever the layout of the latents.
_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
# sgl_kernel has its operators in two builds, for Hopper and for what came after.
_SGLANG = frozenset({"sm90", "sm100", "sm103", "sm120"})
# Scores are fp32, as DeepGEMM returns them: the only type that all of them take.
_LIMITS = (limits.SOME_ROWS, limits.NOTHING_TO_SELECT, deep_gemm.MQA_LOGITS_BYTES)

ARMS = (
    Arm(
        "sglang", _build_sglang, _ANY, "sglang_kernel", _SGLANG,
        (*_LIMITS, sglang_kernel.TOPK_COUNT),
    ),
    Arm(
        "sampled", _build_sampled, _ANY, archs=ANY_GPU, guards=(*_LIMITS, limits.SAMPLED_TOPK),
    ),
    Arm(
        "flashinfer", _build_flashinfer, _ANY, "flashinfer", ANY_GPU,
        (*_LIMITS, flashinfer.TOPK_WORKS),
    ),
    Arm(
        "sglang_v2", _build_sglang_v2, _ANY, "sglang_topk_v2", _SGLANG,
        (*_LIMITS, sglang_kernel.TOPK_COUNT),
    ),
    Arm("torch", _build_torch, _ANY, guards=_LIMITS, reference=True),
)  # fmt: skip
