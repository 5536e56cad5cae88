"""Expanded MHA arms: read the prefix back, kv_b_proj over all kv tokens, dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import e, log2
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel

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


Attend = Callable[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]
"""Attention of all queries over keys and values: outputs [q tokens, heads, v] and the log2 of the
sums of exponents, [q tokens, heads]."""


def _chunks(case: PrefillCase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The prefixes in chunks of at most `max_chunk_kv` tokens, shared alike by the sequences:
    (slots [tokens], first token of each sequence [sequences + 1]) of each chunk."""
    import torch

    starts, rows = case.starts_kv, torch.arange(len(case.slots), device=case.device)
    counts = starts.diff()
    sequence = torch.repeat_interleave(counts, output_size=len(rows))
    position, prefix = rows - starts[sequence], counts - case.starts_q.diff()
    each = max(case.setting.max_chunk_kv // len(counts), 1)
    for first in range(0, int(prefix.max()), each):
        inside = (position >= first) & (position < prefix[sequence].clamp_max(first + each))
        taken = (prefix - first).clamp(0, each)
        yield case.slots[inside], torch.cat((taken.new_zeros(1), taken.cumsum(0)))


def _merged(
    case: PrefillCase, attention: Callable[[torch.Tensor, bool], Attend]
) -> Callable[[], torch.Tensor]:
    """The new tokens causally, the cached ones in chunks without a mask, and all outputs merged, as
    engines run it over a prefix. `attention` is made of where each sequence's keys begin, and of
    whether it is causal."""
    import torch

    from nsa_tune.backend.kernels import merge_outputs

    cpu = case.device.type == "cpu"
    merge = merge_outputs.merge_outputs_reference if cpu else merge_outputs.merge_outputs
    own, new = attention(case.starts_q, True), _expanded(case, _new(case))
    parts = [
        (attention(starts, False), _expanded(case, _read(case, slots)))
        for slots, starts in _chunks(case)
    ]

    def run() -> torch.Tensor:
        out, lse = own(*new())
        for i, (attend, cached) in enumerate(parts, 1):
            more, more_lse = attend(*cached())
            out = merge(out, lse, more, more_lse)
            if i < len(parts):
                lse = torch.logaddexp2(lse, more_lse)
        return out

    return run


def build_fa3_merged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """FlashInfer's FlashAttention-3, merged."""

    def attention(starts: torch.Tensor, causal: bool) -> Attend:
        wrapper = _planned(case, "fa3", starts, causal=causal)
        return lambda keys, values: wrapper.run(case.q, keys, values, return_lse=True)

    return _merged(case, attention)


def _sgl_fa3(case: PrefillCase, starts: torch.Tensor, causal: bool) -> Attend:
    """sglang-kernel's FlashAttention-3 over keys that begin at `starts`."""
    starts_q, starts_kv, scale = case.starts_q.int(), starts.int(), case.profile.softmax_scale
    longest = int(starts_q.diff().max()), int(starts_kv.diff().max())

    def attend(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sglang_kernel.fa3_varlen(
            case.q, keys, values, starts_q, starts_kv, longest, scale, causal=causal
        )

    return attend


def build_sgl_fa3(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by sglang-kernel's FlashAttention-3, as SGLang calls it."""
    attend, expanded = _sgl_fa3(case, case.starts_kv, True), _expanded(case, _all(case))
    return lambda: attend(*expanded())[0]


def build_sgl_fa3_merged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """sglang-kernel's FlashAttention-3, merged."""
    import torch

    def attention(starts: torch.Tensor, causal: bool) -> Attend:
        attend = _sgl_fa3(case, starts, causal)

        def run(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = attend(keys, values)
            base2 = torch.empty(lse.shape[::-1], dtype=lse.dtype, device=lse.device)
            return out, torch.mul(lse.T, log2(e), out=base2)

        return run

    return _merged(case, attention)


def build_trtllm_ragged(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by TRT-LLM's ragged kernels, through FlashInfer."""
    assert case.batch.lens is not None
    starts_q, starts_kv = case.starts_q.int(), case.starts_kv.int()
    longest = max(new for _, new in case.batch.lens), case.batch.max_kv
    scale, expanded = case.profile.softmax_scale, _expanded(case, _all(case))

    def run() -> torch.Tensor:
        keys, values = expanded()
        return flashinfer.trtllm_ragged(case.q, keys, values, starts_q, starts_kv, longest, scale)

    return run
