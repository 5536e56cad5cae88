"""Absorbed MLA arms, of prefill and decode alike: absorb q, sparse attention, project to v."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flash_mla.limits import padded_heads
from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang import calls as sglang
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel
from nsa_tune.backend.types.layouts import KVLayout

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.attention_case import PrefillCase
    from nsa_tune.backend.types.batch import Batch

_GATHERED_AT_ONCE = 2**17

Run = Callable[[], "torch.Tensor"]


def _absorb(case: PrefillCase, heads: int) -> torch.Tensor:
    """q in latent space [q tokens, `heads`, rank + rope] bf16, zero in the padding heads."""
    import torch

    profile = case.profile
    pad = heads > case.heads
    q = (torch.zeros if pad else torch.empty)(
        len(case.q), heads, profile.latent, dtype=case.q.dtype, device=case.device
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


def around(
    case: PrefillCase, attend: Callable[[torch.Tensor], torch.Tensor], heads: int | None = None
) -> Run:
    """`attend`, from absorbed queries of `heads` (the case's) to mixed latents, with what comes
    before and after it."""
    return lambda: _project(case, attend(_absorb(case, heads or case.heads)))


def per_pass(
    of: Callable[[Any, Callable[[], Any]], Run],
) -> tuple[Callable[[Any], Run], Callable[[Any], Run]]:
    """`of` a case and FlashMLA's schedule: in later layers of a pass, and in the first one, which
    computes the schedule for all."""

    def build(case: Any) -> Run:
        schedule = flash_mla.new_schedule()
        return of(case, lambda: schedule)

    return build, lambda case: of(case, flash_mla.new_schedule)


def _padded(case: PrefillCase) -> int:
    padded = padded_heads(case.heads)
    assert padded is not None
    return padded


# --- what sparse attention over bf16 reads: (latents, indices into them)


def _source(case: PrefillCase) -> tuple[Run, torch.Tensor]:
    """A bf16 pool where it lies; of a packed one all that the batch holds, read back first.

    Without a prefix the new tokens' two parts are only joined.
    """
    import torch

    if case.layout is KVLayout.BF16:
        return lambda: case.pool, case.paged_indices
    if case.has_prefix:
        return case.read_back(case.slots), case.ragged_indices
    return lambda: torch.cat((case.new_latent, case.new_rope), dim=-1), case.ragged_indices


def _selected(case: PrefillCase) -> tuple[Run, torch.Tensor]:
    """A bf16 pool where it lies; of a packed one each row's selection, whatever the context."""
    import torch

    from nsa_tune.backend.kernels import packed_fp8

    if case.layout is KVLayout.BF16:
        return lambda: case.pool, case.paged_indices
    rank, rope = case.profile.rank, case.profile.rope
    chosen = case.paged_indices
    place = torch.arange(chosen.numel(), device=case.device, dtype=torch.int32).view_as(chosen)
    place = torch.where(chosen >= 0, place, -1)
    on_cpu = case.device.type == "cpu"
    widen = packed_fp8.dequantize_reference if on_cpu else packed_fp8.dequantize

    def gather() -> torch.Tensor:
        return widen(case.pool, chosen.clamp_min(0).flatten(), rank, rope)

    return gather, place


# --- arms


def _sparse_forward(case: PrefillCase, source: tuple[Run, torch.Tensor]) -> Run:
    latents, chosen = source
    indices, scale = chosen[:, None], case.profile.softmax_scale

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flash_mla.sparse_forward(q, latents()[:, None], indices, scale, case.topk_length)

    return around(case, attend, _padded(case))


def build_flashmla_sparse(case: PrefillCase) -> Run:
    """flash_mla_sparse_fwd: over the bf16 pool itself, or over what is dequantized first."""
    return _sparse_forward(case, _source(case))


def build_flashmla_selected(case: PrefillCase) -> Run:
    """flash_mla_sparse_fwd: over the bf16 pool itself, or over each row's dequantized selection.

    What it reads has the same size at any context, as a captured decode needs.
    """
    return _sparse_forward(case, _selected(case))


def _flashmla_kv(
    queries_a_row: Callable[[Batch], int], case: PrefillCase, schedule: Callable[[], Any]
) -> Run:
    """flash_mla_with_kvcache, the decode kernel over the packed pool."""
    import torch

    each, scale = queries_a_row(case.batch), case.profile.softmax_scale
    pool = case.pool.view(torch.float8_e4m3fn).view(
        -1, case.profile.page_size, 1, case.pool.shape[1]
    )
    indices = case.paged_indices.unflatten(0, (-1, each))

    def attend(q: torch.Tensor) -> torch.Tensor:
        q = q.unflatten(0, (-1, each))
        return flash_mla.sparse_decode(q, pool, indices, scale, schedule()).flatten(0, 1)

    return around(case, attend, _padded(case))


build_flashmla_kv, first_flashmla_kv = per_pass(partial(_flashmla_kv, lambda batch: 1))
# As vLLM calls it for a mixed batch, and for a decode.
build_flashmla_kv_mixed, first_flashmla_kv_mixed = per_pass(
    partial(_flashmla_kv, attrgetter("q_tokens"))
)
build_flashmla_kv_grouped, first_flashmla_kv_grouped = per_pass(
    partial(_flashmla_kv, attrgetter("next_n"))
)


def build_fa3(case: PrefillCase) -> Run:
    """FlashAttention-3 over the bf16 pool: pages of one token, the selection as the page table."""
    import torch

    rank, scale, indices = case.profile.rank, case.profile.softmax_scale, case.paged_indices
    lengths = case.topk_length
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=case.device)

    def attend(q: torch.Tensor) -> torch.Tensor:
        nope, rope = q[..., :rank], q[..., rank:]
        return sglang_kernel.fa3_sparse(nope, rope, case.pool, indices, lengths, starts, scale)

    return around(case, attend)


def build_sglang_triton(case: PrefillCase, union: int = 0) -> Run:
    """SGLang's Triton kernel for few heads: over the bf16 pool, or what is dequantized first."""
    rank, scale, (latents, chosen) = case.profile.rank, case.profile.softmax_scale, _source(case)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return sglang.triton_sparse(q, latents(), chosen, scale, rank, case.topk_length, union)

    return around(case, attend)


def build_flashmla_sparse_q8(case: PrefillCase) -> Run:
    """SGLang's fp8 kernel over e4m3 copies of q and of all that the batch holds, scales of 1.

    Its first call compiles. The padding heads of q are zeros of an earlier pass, as in SGLang.
    """
    import torch

    profile, latents, indices = case.profile, _narrowed(case), case.ragged_indices
    unit = torch.ones(1, dtype=torch.float32, device=case.device)
    shape = (case.batch.q_tokens, _padded(case), profile.latent)
    q = torch.zeros(shape, device=case.device).to(torch.float8_e4m3fn)
    q_rope = case.q[..., profile.nope :]

    def run() -> torch.Tensor:
        nope = case.q[..., : profile.nope].transpose(0, 1)
        sglang.cast_q(q, torch.bmm(nope, case.w_uk).transpose(0, 1), q_rope)
        out = sglang.q8_prefill(q, latents(), indices, profile.softmax_scale, unit)
        return _project(case, out)

    return run


def _narrowed(case: PrefillCase) -> Run:
    """All kv tokens' latents [kv tokens + topk, rank + rope] e4m3, zeros behind the tokens.

    Without a prefix the new tokens' two parts are joined and cast, as SGLang does by default.
    """
    import torch

    from nsa_tune.backend.kernels import packed_fp8

    rank, rope, spare = case.profile.rank, case.profile.rope, case.profile.index_topk
    if case.has_prefix:
        on_cpu = case.device.type == "cpu"
        narrow = packed_fp8.narrow_reference if on_cpu else packed_fp8.narrow
        return lambda: narrow(case.pool, case.slots, rank, rope, spare)
    tokens = case.batch.q_tokens
    out = torch.empty(tokens + spare, rank + rope, dtype=torch.float8_e4m3fn, device=case.device)

    def join() -> torch.Tensor:
        out[:tokens].copy_(torch.cat((case.new_latent, case.new_rope), dim=-1))
        out[tokens:].view(torch.uint8).zero_()
        return out

    return join


def build_triton_split(case: PrefillCase) -> Run:
    """nsa-tune's kernel for few rows over a bf16 pool: each row's selection is split."""
    from nsa_tune.backend.kernels.split_sparse_mla import split_sparse_mla

    rank, scale, indices = case.profile.rank, case.profile.softmax_scale, case.paged_indices
    return around(case, lambda q: split_sparse_mla(q, case.pool, indices, scale, rank))


def build_trtllm(case: PrefillCase) -> Run:
    """TRT-LLM's sparse MLA over the pool itself, one row a query."""
    profile = case.profile
    pool = case.pool.view(-1, 1, profile.page_size, case.pool.shape[1])
    indices, longest = case.paged_indices[:, None], case.batch.max_kv
    seen = (case.positions + 1).int()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flashinfer.trtllm_sparse_decode(
            q[:, None], pool, indices, seen, longest, profile.nope, profile.softmax_scale
        )[:, 0]

    return around(case, attend)


def build_triton(case: PrefillCase) -> Run:
    """nsa-tune's own kernel over the pool itself, whichever of the two layouts it has."""
    from nsa_tune.backend.kernels.sparse_mla import sparse_mla

    rank, scale, indices = case.profile.rank, case.profile.softmax_scale, case.paged_indices
    return around(case, lambda q: sparse_mla(q, case.pool, indices, scale, rank))


# --- the same in torch


def _sparse_torch(
    case: PrefillCase,
    gather: Callable[[torch.Tensor], torch.Tensor],
    indices: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sparse attention in torch over `gather(indices)`, some rows at a time; then project.

    `rounded` is what a kernel's precision does to absorbed queries, and to softmax weights before
    they are divided by their sum.
    """
    import torch

    profile = case.profile
    q = _absorb(case, case.heads)
    if rounded is not None:
        q = rounded(q)
    mixed = torch.empty(*q.shape[:2], profile.rank, dtype=q.dtype, device=case.device)
    step = max(_GATHERED_AT_ONCE // profile.index_topk, 1)
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        chosen = indices[rows]
        keys = gather(chosen.clamp_min(0).flatten()).view(*chosen.shape, profile.latent)
        scores = torch.einsum("rhc,rkc->rhk", q[rows], keys).float() * profile.softmax_scale
        scores = scores.masked_fill((chosen < 0)[:, None], -torch.inf)
        weights = scores.softmax(-1).to(q.dtype) if rounded is None else _through(rounded, scores)
        mixed[rows] = torch.einsum("rhk,rkc->rhc", weights, keys[..., : profile.rank])
    return _project(case, mixed)


def _through(rounded: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    """Softmax weights whose numerators are rounded, as kernels do; sums are of unrounded ones."""
    numerators = (scores - scores.amax(-1, keepdim=True)).exp()
    return (rounded(numerators).float() / numerators.sum(-1, keepdim=True)).bfloat16()


def build_torch_sparse(case: PrefillCase) -> Run:
    """The order of flashmla_sparse in torch: read everything back, then select from it."""
    latents, chosen = _source(case)
    return lambda: _sparse_torch(case, latents().__getitem__, chosen)


def build_torch_sparse_q8(case: PrefillCase) -> Run:
    """The roundings of flashmla_sparse_q8 in torch: q, latents and softmax weights through e4m3."""
    import torch

    latents, chosen = _narrowed(case), case.ragged_indices

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float8_e4m3fn).to(torch.bfloat16)

    def run() -> torch.Tensor:
        keys = latents().to(torch.bfloat16)
        return _sparse_torch(case, keys.__getitem__, chosen, rounded)

    return run


def build_torch_selected(case: PrefillCase) -> Run:
    """As `build_torch_sparse`, but reads back what is selected only."""
    latents, chosen = _selected(case)
    return lambda: _sparse_torch(case, latents().__getitem__, chosen)


def build_torch_kv(case: PrefillCase) -> Run:
    """The order of flashmla_kv in torch: select from the packed pool, then widen the selection."""
    from nsa_tune.backend.kernels import packed_fp8

    rank, rope = case.profile.rank, case.profile.rope

    def gather(slots: torch.Tensor) -> torch.Tensor:
        return packed_fp8.dequantize_reference(case.pool, slots, rank, rope)

    return lambda: _sparse_torch(case, gather, case.paged_indices)
