"""Expanded MHA arms: read the prefix back, kv_b_proj over all kv tokens, dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsa_tune.backend.types.layouts import KVLayout

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.prefill.case import PrefillCase

__all__ = ["build_fa2", "build_fa3", "build_torch", "build_trtllm_ragged", "read_back"]


def _latents(case: PrefillCase) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """All kv tokens' (latent [tokens, rank], rope [tokens, rope]) in bf16, read back if need be."""
    profile = case.profile
    if not case.has_prefix:
        return lambda: (case.new_latent, case.new_rope)
    read = read_back(case)

    def split() -> tuple[torch.Tensor, torch.Tensor]:
        both = read()
        return both[:, : profile.rank], both[:, profile.rank :]

    return split


def read_back(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """All kv tokens' latents [kv tokens, rank + rope] bf16, gathered from the pool."""
    if case.layout is KVLayout.BF16:
        return lambda: case.pool.index_select(0, case.slots)
    from nsa_tune.backend.kernels import packed_fp8

    rank, rope = case.profile.rank, case.profile.rope
    if case.device.type == "cpu":
        return lambda: packed_fp8.dequantize_reference(case.pool, case.slots, rank, rope)
    return lambda: packed_fp8.dequantize(case.pool, case.slots, rank, rope)


def _expanded(case: PrefillCase) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Keys [kv tokens, heads, nope + rope] and values [kv tokens, heads, v] of expanded MHA."""
    import torch.nn.functional as F

    from nsa_tune.backend.kernels import concat_key

    profile = case.profile
    latents = _latents(case)
    concat = concat_key.concat_key_reference if case.device.type == "cpu" else concat_key.concat_key

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = latents()
        both = F.linear(latent, case.w_kv).view(-1, case.heads, profile.nope + profile.v)
        return concat(both, rope, profile.nope), both[..., profile.nope :]

    return run


def build_torch(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by torch's scaled_dot_product_attention, one sequence after the other."""
    import torch
    import torch.nn.functional as F

    expanded = _expanded(case)
    q_at, kv_at = case.starts_q.tolist(), case.starts_kv.tolist()
    masks = []
    assert case.batch.lens is not None
    for prefix, new in case.batch.lens:
        key = torch.arange(prefix + new, device=case.device)
        mask = key[None] <= (prefix + torch.arange(new, device=case.device))[:, None]
        # Without a prefix the mask is the one that torch's kernels know by themselves.
        masks.append(mask if prefix else None)

    def run() -> torch.Tensor:
        keys, values = expanded()
        parts = []
        for i, mask in enumerate(masks):
            q = case.q[q_at[i] : q_at[i + 1]].transpose(0, 1)
            k = keys[kv_at[i] : kv_at[i + 1]].transpose(0, 1)
            v = values[kv_at[i] : kv_at[i + 1]].transpose(0, 1)
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None,
                scale=case.profile.softmax_scale,
            )  # fmt: skip
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return run


def _flashinfer(case: PrefillCase, backend: str) -> Callable[[], torch.Tensor]:
    import torch

    from nsa_tune.backend.libraries.flashinfer import calls as flashinfer

    profile = case.profile
    wrapper = flashinfer.ragged_wrapper(case.device, backend)
    # Planned on the host once a pass, for all layers: outside of what is timed.
    wrapper.plan(
        case.starts_q.int(),
        case.starts_kv.int(),
        case.heads,
        case.heads,
        profile.nope + profile.rope,
        head_dim_vo=profile.v,
        causal=True,
        sm_scale=profile.softmax_scale,
        q_data_type=torch.bfloat16,
    )
    expanded = _expanded(case)

    def run() -> torch.Tensor:
        keys, values = expanded()
        out: torch.Tensor = wrapper.run(case.q, keys, values)
        return out

    return run


def build_fa3(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by FlashInfer's FlashAttention-3."""
    return _flashinfer(case, "fa3")


def build_fa2(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by FlashInfer's FlashAttention-2."""
    return _flashinfer(case, "fa2")


def build_trtllm_ragged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by TRT-LLM's ragged kernels, through FlashInfer."""
    from nsa_tune.backend.libraries.flashinfer import calls as flashinfer

    assert case.batch.lens is not None
    starts_q, starts_kv = case.starts_q.int(), case.starts_kv.int()
    longest = max(new for _, new in case.batch.lens), case.batch.max_kv
    scale, expanded = case.profile.softmax_scale, _expanded(case)

    def run() -> torch.Tensor:
        keys, values = expanded()
        return flashinfer.trtllm_ragged(case.q, keys, values, starts_q, starts_kv, longest, scale)

    return run
