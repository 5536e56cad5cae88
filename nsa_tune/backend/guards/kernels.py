"""Limits of nsa-tune's own Triton kernels."""

from __future__ import annotations

from nsa_tune.backend.batch import Batch
from nsa_tune.backend.point import Guard, Setting

__all__ = ["SELECTION_BYTES", "TRITON_SHAPE"]


def _triton_shape(batch: Batch, setting: Setting) -> str | None:
    del batch
    widths = (setting.profile.rank, setting.profile.rope)
    if any(width < 16 or width & (width - 1) for width in widths):
        return f"the Triton kernel takes widths that are powers of two from 16, not {widths}"
    return None


def _selection_bytes(batch: Batch, setting: Setting) -> str | None:
    profile, memory = setting.profile, setting.device.memory
    needed = batch.q_tokens * profile.index_topk * 2 * profile.latent
    if memory and needed > memory // 4:
        return f"{needed / 2**30:.1f} GiB of gathered latents pass a quarter of the device's memory"
    return None


TRITON_SHAPE = Guard(
    "triton_shape", "formula", "backend/kernels/sparse_mla.py: one block spans a latent",
    _triton_shape,
)  # fmt: skip
SELECTION_BYTES = Guard(
    "selection_bytes", "formula", "backend/points/decode.py: each row's selection is gathered",
    _selection_bytes,
)  # fmt: skip
