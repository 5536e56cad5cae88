"""Decision point `prefill`: expanded MHA or absorbed MLA, and by which kernel.

An arm is everything that only its way costs in one layer. MHA reads the prefix back, runs
kv_b_proj over all kv tokens, builds the keys and runs dense attention. MLA absorbs q, reads back
what its kernel needs, runs sparse attention and projects to v. Without any prefix nothing is read
back: the new tokens' bf16 latents are at hand, except for the kernel that reads the pool itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from nsa_tune.backend import guards
from nsa_tune.backend.batch import Batch, Mode
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Answer, Arm, Case, Point, Setting
from nsa_tune.backend.points import _prefill_batches as batches
from nsa_tune.backend.points import _prefill_work as work

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.cases.prefill import PrefillCase

__all__ = ["PREFILL"]


_WORKSPACE_BYTES = 128 * 2**20
_GATHERED_AT_ONCE = 2**17


def _latents(case: PrefillCase) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """All kv tokens' (latent [tokens, rank], rope [tokens, rope]) in bf16, read back if need be."""
    profile = case.profile
    if not case.has_prefix:
        return lambda: (case.new_latent, case.new_rope)
    read = _read_back(case)

    def split() -> tuple[torch.Tensor, torch.Tensor]:
        both = read()
        return both[:, : profile.rank], both[:, profile.rank :]

    return split


def _read_back(case: PrefillCase) -> Callable[[], torch.Tensor]:
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


def _build_mha_torch(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by torch, one sequence after the other."""
    import torch
    import torch.nn.functional as F

    expanded = _expanded(case)
    q_at, kv_at = case.starts_q.tolist(), case.starts_kv.tolist()
    masks = []
    assert case.batch.lens is not None
    for prefix, new in case.batch.lens:
        key = torch.arange(prefix + new, device=case.device)
        masks.append(key[None] <= (prefix + torch.arange(new, device=case.device))[:, None])

    def run() -> torch.Tensor:
        keys, values = expanded()
        parts = []
        for i, mask in enumerate(masks):
            q = case.q[q_at[i] : q_at[i + 1]].transpose(0, 1)
            k = keys[kv_at[i] : kv_at[i + 1]].transpose(0, 1)
            v = values[kv_at[i] : kv_at[i + 1]].transpose(0, 1)
            scale = case.profile.softmax_scale
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    return run


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """FlashInfer's float workspace; its wrappers on one stream may share it."""
    import torch

    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _build_mha_fa3(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """Dense attention by FlashInfer's FlashAttention-3."""
    import torch

    from nsa_tune.backend import providers

    flashinfer = providers.load("flashinfer")
    profile = case.profile
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(case.device), "NHD", backend="fa3"
    )
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


def _absorb(case: PrefillCase, heads: int) -> torch.Tensor:
    """q in latent space [q tokens, `heads`, rank + rope] bf16, zero in the padding heads."""
    import torch

    profile = case.profile
    pad = heads > case.heads
    q = (torch.zeros if pad else torch.empty)(
        case.q.shape[0], heads, profile.latent, dtype=case.q.dtype, device=case.device
    )
    own = q[:, : case.heads]
    nope = case.q[..., : profile.nope].transpose(0, 1)
    torch.bmm(nope, case.w_uk, out=own[..., : profile.rank].transpose(0, 1))
    own[..., profile.rank :].copy_(case.q[..., profile.nope :])
    return q


def _project(case: PrefillCase, mixed: torch.Tensor) -> torch.Tensor:
    """Values [q tokens, heads, v] of mixed latents [q tokens, >= heads, rank]."""
    import torch

    out = torch.empty(
        mixed.shape[0], case.heads, case.profile.v, dtype=mixed.dtype, device=case.device
    )
    torch.bmm(mixed[:, : case.heads].transpose(0, 1), case.w_uv, out=out.transpose(0, 1))
    return out


def _sparse_source(case: PrefillCase) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """What sparse attention over bf16 reads: (latents, indices into them).

    A bf16 pool is read where it lies; a packed one is read back first; and without a prefix the
    new tokens' two parts are only joined.
    """
    import torch

    if case.layout is KVLayout.BF16:
        return lambda: case.pool, case.paged_indices
    if case.has_prefix:
        return _read_back(case), case.ragged_indices
    return lambda: torch.cat((case.new_latent, case.new_rope), dim=-1), case.ragged_indices


def _build_mla_flashmla_sparse(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """flash_mla_sparse_fwd: over the bf16 pool itself, or over what is dequantized first."""
    from nsa_tune.backend.providers import flash_mla

    padded = guards.padded_heads(case.heads)
    assert padded is not None
    latents, chosen = _sparse_source(case)
    indices = chosen[:, None]

    def run() -> torch.Tensor:
        q, kv = _absorb(case, padded), latents()[:, None]
        scale = case.profile.softmax_scale
        return _project(case, flash_mla.sparse_forward(q, kv, indices, scale, case.topk_length))

    return run


def _build_mla_flashmla_kv(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """flash_mla_with_kvcache: the decode kernel over the packed pool, one row a query."""
    import torch

    from nsa_tune.backend.providers import flash_mla

    padded = guards.padded_heads(case.heads)
    assert padded is not None
    pool = case.pool.view(torch.float8_e4m3fn).view(
        -1, case.profile.page_size, 1, case.pool.shape[1]
    )
    indices = case.paged_indices[:, None]

    def run() -> torch.Tensor:
        q = _absorb(case, padded)[:, None]
        out = flash_mla.sparse_decode(q, pool, indices, case.profile.softmax_scale)
        return _project(case, out[:, 0])

    return run


def _sparse_torch(
    case: PrefillCase, gather: Callable[[torch.Tensor], torch.Tensor], indices: torch.Tensor
) -> torch.Tensor:
    """Sparse attention in torch over `gather(indices)`, some rows at a time; then project."""
    import torch

    profile = case.profile
    q = _absorb(case, case.heads)
    mixed = torch.empty(*q.shape[:2], profile.rank, dtype=q.dtype, device=case.device)
    step = max(_GATHERED_AT_ONCE // profile.index_topk, 1)
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        chosen = indices[rows]
        keys = gather(chosen.clamp_min(0).flatten()).view(*chosen.shape, profile.latent)
        scores = torch.einsum("rhc,rkc->rhk", q[rows], keys).float() * profile.softmax_scale
        weights = scores.masked_fill((chosen < 0)[:, None], -torch.inf).softmax(-1).to(q.dtype)
        mixed[rows] = torch.einsum("rhk,rkc->rhc", weights, keys[..., : profile.rank])
    return _project(case, mixed)


def _build_mla_torch_sparse(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """The order of flashmla_sparse in torch: read everything back, then select from it."""
    latents, chosen = _sparse_source(case)
    return lambda: _sparse_torch(case, latents().__getitem__, chosen)


def _build_mla_torch_kv(case: PrefillCase) -> Callable[[], torch.Tensor]:
    """The order of flashmla_kv in torch: select from the packed pool, then widen the selection."""
    from nsa_tune.backend.kernels import packed_fp8

    rank, rope = case.profile.rank, case.profile.rope

    def gather(slots: torch.Tensor) -> torch.Tensor:
        return packed_fp8.dequantize_reference(case.pool, slots, rank, rope)

    return lambda: _sparse_torch(case, gather, case.paged_indices)


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.cases.prefill import prefill_case

    return prefill_case(batch, setting, device)


_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
_PACKED = frozenset({KVLayout.FP8_PACKED})
_HOPPER = frozenset({"sm90"})
_FLASHMLA = frozenset({"sm90", "sm100"})
_DENSE = (guards.DENSE_EXACT, guards.CHUNK_CAPACITY, guards.NOT_CAPTURED)
_SPARSE_FWD = (
    guards.SPARSE_FWD_OFFSETS,
    guards.multiple_of_topk(
        128, "flash_mla_sparse_fwd", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:577"
    ),
)
_DECODE_KERNEL = (
    guards.FLASHMLA_SCHEDULE,
    guards.FLASHMLA_OFFSETS,
    guards.multiple_of_topk(
        64, "flash_mla_with_kvcache", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689"
    ),
)

PREFILL = Point(
    name="prefill",
    modes=frozenset({Mode.EXTEND}),
    arms=(
        Arm(
            "mha/fa3", _build_mha_fa3, _ANY, "flashinfer", _HOPPER, (*_DENSE, guards.FA3_WORKS)
        ),
        Arm(
            "mla/flashmla_sparse", _build_mla_flashmla_sparse, _ANY, "flash_mla", _FLASHMLA,
            _SPARSE_FWD,
        ),
        Arm(
            "mla/flashmla_kv", _build_mla_flashmla_kv, _PACKED, "flash_mla", _FLASHMLA,
            _DECODE_KERNEL,
        ),
        Arm("mha/torch", _build_mha_torch, _ANY, guards=_DENSE, reference=True),
        Arm("mla/torch_sparse", _build_mla_torch_sparse, _ANY, reference=True),
        Arm("mla/torch_kv", _build_mla_torch_kv, _PACKED, reference=True),
    ),
    answers=(
        Answer(
            "prefill_path",
            {
                "mha": ("mha/fa3", "mha/torch"),
                "mla": (
                    "mla/flashmla_sparse", "mla/flashmla_kv", "mla/torch_sparse", "mla/torch_kv",
                ),
            },
        ),
        Answer("mha_kernel", {"fa3": ("mha/fa3",), "torch": ("mha/torch",)}),
        # Also read when mha won: under graph capture an engine can take mla only.
        Answer(
            "sparse_prefill",
            {
                "flashmla_sparse": ("mla/flashmla_sparse",),
                "flashmla_kv": ("mla/flashmla_kv",),
                "torch_sparse": ("mla/torch_sparse",),
                "torch_kv": ("mla/torch_kv",),
            },
        ),
    ),
    terms=work.TERMS,
    cost_terms=work.cost_terms,
    coordinates=work.COORDINATES,
    locate=work.locate,
    sheet=lambda batch: int(batch.prefix_tokens > 0),
    grid=batches.grid,
    case=_case,
    sample=batches.sample,
)  # fmt: skip
