"""Absorbed MLA over all tokens, of prefill and decode alike: absorb q, attention, project to v."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang import calls as sglang
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel
from nsa_tune.backend.points.mla import around, per_pass

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.attention_case import DenseCase

Run = Callable[[], "torch.Tensor"]


def _fa3(case: DenseCase, pool: torch.Tensor, page_table: torch.Tensor) -> Run:
    rank, scale, starts_q = case.profile.rank, case.profile.softmax_scale, case.starts_q.int()
    lengths, longest_q = case.starts_kv.diff().int(), int(case.starts_q.diff().max())

    def attend(q: torch.Tensor) -> torch.Tensor:
        nope, rope = q[..., :rank], q[..., rank:]
        return sglang_kernel.fa3_absorbed(
            nope, rope, pool, page_table, lengths, starts_q, longest_q, scale
        )

    return around(case, attend)


def build_fa3(case: DenseCase) -> Run:
    """FlashAttention-3 with `qv` and pages of one token, as SGLang calls it by default."""
    return _fa3(case, case.pool[:, None], case.slot_table)


def build_fa3_paged(case: DenseCase) -> Run:
    """The same with the pool's own pages, as vLLM calls it."""
    return _fa3(case, case.pool.unflatten(0, (-1, case.profile.page_size)), case.block_table)


def _flashmla(case: DenseCase, schedule: Callable[[], Any]) -> Run:
    """flash_mla_with_kvcache, with equally many queries a sequence."""
    pool = case.pool.view(-1, case.profile.page_size, 1, case.profile.latent)
    lengths, sequences = case.starts_kv.diff().int(), case.batch.batch_size
    scale = case.profile.softmax_scale

    def attend(q: torch.Tensor) -> torch.Tensor:
        q = q.unflatten(0, (sequences, -1))
        out = flash_mla.dense_decode(q, pool, case.block_table, lengths, scale, schedule())
        return out.flatten(0, 1)

    return around(case, attend)


build_flashmla, first_flashmla = per_pass(_flashmla)


def build_flashinfer(case: DenseCase) -> Run:
    """FlashInfer's MLA wrapper with pages of one token, as SGLang calls it: its FlashAttention-3
    kernel on Hopper, FlashAttention-2 elsewhere. Planned on the host once a pass."""
    import torch

    profile = case.profile
    hopper = case.setting.device.arch == "sm90"
    wrapper = flashinfer.mla_wrapper(case.device, "fa3" if hopper else "fa2")
    wrapper.plan(
        qo_indptr=case.starts_q.int(),
        kv_indptr=case.starts_kv.int(),
        kv_indices=case.slots,
        kv_len_arr=case.starts_kv.diff().int(),
        num_heads=case.heads,
        head_dim_ckv=profile.rank,
        head_dim_kpe=profile.rope,
        page_size=1,
        causal=True,
        sm_scale=profile.softmax_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    latents, ropes = case.pool[:, None, : profile.rank], case.pool[:, None, profile.rank :]

    def attend(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(
            q[..., : profile.rank], q[..., profile.rank :], latents, ropes
        )
        return out

    return around(case, attend)


_TRITON_PARTS = 8
"""SGLang's `--triton-attention-num-kv-splits` by default."""


def build_triton(case: DenseCase) -> Run:
    """SGLang's Triton decode with pages of one token; the parts are counted once a pass."""
    import torch

    rows, heads, rank = case.batch.q_tokens, case.heads, case.profile.rank
    starts, lengths = case.starts_kv.int(), case.starts_kv.diff().int()
    splits = sglang.triton_splits(lengths, heads, _TRITON_PARTS, case.setting.device.sms)
    sums = torch.empty(rows, heads, _TRITON_PARTS, dtype=torch.float32, device=case.device)
    scratch = sums.new_empty(rows, heads, _TRITON_PARTS, rank), sums

    def attend(q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(rows, heads, rank)
        sglang.triton_decode(
            q, case.pool[:, None], out, starts, case.slots, scratch, splits,
            case.profile.softmax_scale,
        )  # fmt: skip
        return out

    return around(case, attend)


def build_torch(case: DenseCase) -> Run:
    """Absorbed attention in torch, one sequence after the other."""
    import torch

    profile, scale = case.profile, case.profile.softmax_scale
    ends_q, ends_kv = case.starts_q.tolist(), case.starts_kv.tolist()
    spans = [
        (slice(*ends_q[i : i + 2]), slice(*ends_kv[i : i + 2])) for i in range(len(ends_q) - 1)
    ]

    def attend(q: torch.Tensor) -> torch.Tensor:
        mixed = torch.empty_like(q[..., : profile.rank])
        for rows, tokens in spans:
            keys = case.pool[case.slots[tokens].long()]
            scores = torch.einsum("rhc,kc->hrk", q[rows], keys).float() * scale
            unseen = torch.arange(len(keys), device=case.device) > case.positions[rows, None]
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(q.dtype)
            mixed[rows] = torch.einsum("hrk,kc->rhc", weights, keys[:, : profile.rank])
        return mixed

    return around(case, attend)
