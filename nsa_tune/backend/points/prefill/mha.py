"""Expanded MHA arms: read the prefix back, kv_b_proj over all kv tokens, dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.attention_case import PrefillCase

Latents = Callable[[], "tuple[torch.Tensor, torch.Tensor]"]
"""Makes the (latent [tokens, rank], rope [tokens, rope]) of some tokens in bf16."""


def _new(case: PrefillCase) -> Latents:
    """The new tokens' latents, which are at hand."""
    return lambda: (case.new_latent, case.new_rope)


def _read(case: PrefillCase, slots: torch.Tensor) -> Latents:
    """The latents of the tokens in `slots`, read back."""
    profile = case.profile
    read = case.read_back(slots)

    def split() -> tuple[torch.Tensor, torch.Tensor]:
        both = read()
        return both[:, : profile.rank], both[:, profile.rank :]

    return split


def _all(case: PrefillCase) -> Latents:
    """All kv tokens' latents, read back if there is a prefix."""
    return _read(case, case.slots) if case.has_prefix else _new(case)


def _expanded(
    case: PrefillCase, latents: Latents
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Keys [tokens, heads, nope + rope] and values [tokens, heads, v] of expanded MHA."""
    import torch.nn.functional as F

    from nsa_tune.backend.kernels import concat_key

    profile = case.profile
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

    expanded = _expanded(case, _all(case))
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


def _planned(case: PrefillCase, backend: str, starts_kv: torch.Tensor, *, causal: bool) -> Any:
    """FlashInfer's wrapper for the batch's queries, over keys that begin at `starts_kv`."""
    import torch

    from nsa_tune.backend.libraries.flashinfer import calls as flashinfer

    profile = case.profile
    wrapper = flashinfer.ragged_wrapper(case.device, backend)
    # Planned on the host once a pass, for all layers: outside of what is timed.
    wrapper.plan(
        case.starts_q.int(),
        starts_kv.int(),
        case.heads,
        case.heads,
        profile.nope + profile.rope,
        head_dim_vo=profile.v,
        causal=causal,
        sm_scale=profile.softmax_scale,
        q_data_type=torch.bfloat16,
    )
    return wrapper


def _flashinfer(case: PrefillCase, backend: str) -> Callable[[], torch.Tensor]:
    wrapper = _planned(case, backend, case.starts_kv, causal=True)
    expanded = _expanded(case, _all(case))

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


def build_fa3_merged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """FlashAttention-3 as vLLM runs it over a prefix: the new tokens causally, the cached ones
    without a mask, and both outputs merged."""
    from nsa_tune.backend.kernels import merge_outputs

    cpu = case.device.type == "cpu"
    merge = merge_outputs.merge_outputs_reference if cpu else merge_outputs.merge_outputs
    starts_cached = case.starts_kv - case.starts_q
    new_wrapper = _planned(case, "fa3", case.starts_q, causal=True)
    cached_wrapper = _planned(case, "fa3", starts_cached, causal=False)
    new = _expanded(case, _new(case))
    cached = _expanded(case, _read(case, case.slots[case.is_cached]))

    def run() -> torch.Tensor:
        own = new_wrapper.run(case.q, *new(), return_lse=True)
        return merge(*own, *cached_wrapper.run(case.q, *cached(), return_lse=True))

    return run


def build_trtllm_ragged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by TRT-LLM's ragged kernels, through FlashInfer."""
    from nsa_tune.backend.libraries.flashinfer import calls as flashinfer

    assert case.batch.lens is not None
    starts_q, starts_kv = case.starts_q.int(), case.starts_kv.int()
    longest = max(new for _, new in case.batch.lens), case.batch.max_kv
    scale, expanded = case.profile.softmax_scale, _expanded(case, _all(case))

    def run() -> torch.Tensor:
        keys, values = expanded()
        return flashinfer.trtllm_ragged(case.q, keys, values, starts_q, starts_kv, longest, scale)

    return run
