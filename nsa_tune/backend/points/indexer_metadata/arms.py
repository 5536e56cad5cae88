"""The arms that schedule the indexer's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.libraries.deep_gemm.limits import ARCHS, METADATA_ROWS, MQA_SHAPE
from nsa_tune.backend.points.limits import SOME_ROWS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_metadata.case import MetadataCase


def _build_deep_gemm(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """get_paged_mqa_logits_metadata."""
    return lambda: deep_gemm.schedule(case.context_lens, case.profile.page_size)


def _build_triton(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """nsa-tune's own kernel."""
    from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule

    return lambda: mqa_schedule(case.context_lens, case.sms, case.split)


def _build_torch(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """Prefix sums and a search in torch."""
    from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule_reference

    return lambda: mqa_schedule_reference(case.context_lens, case.sms, case.split)


_ANY = frozenset(KVLayout)

ARMS = (
    Arm(
        "deep_gemm", _build_deep_gemm, _ANY, "deep_gemm", ARCHS,
        (SOME_ROWS, MQA_SHAPE, METADATA_ROWS),
    ),
    Arm("triton", _build_triton, _ANY, archs=ANY_GPU, guards=(SOME_ROWS,)),
    Arm("torch", _build_torch, _ANY, reference=True),
)  # fmt: skip
