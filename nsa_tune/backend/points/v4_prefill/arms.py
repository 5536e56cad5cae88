"""The arms of V4's prefill: over a dequantized copy, or over the pools themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flash_mla.limits import (
    ARCHS,
    DECODE_ROWS,
    padded_heads,
    schedule_surcharge,
)
from nsa_tune.backend.points.limits import SOME_ROWS
from nsa_tune.backend.points.mla import per_pass
from nsa_tune.backend.points.v4_prefill.features import OF_SPARSE_FWD, OF_WITH_KVCACHE
from nsa_tune.backend.points.v4_prefill.limits import (
    COLUMNS,
    indices_guard,
    ratio_guard,
    workspace_guard,
)
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, SparseArm

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.v4_prefill.case import V4PrefillCase

_GATHERED_AT_ONCE = 2**16
_V4 = frozenset({KVLayout.V4_PAGED})


def _padded(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """q with as many heads as FlashMLA computes, zero in those that are not there."""
    import torch

    heads = padded_heads(case.heads)
    assert heads is not None
    if heads == case.heads:
        return lambda: case.q

    def pad() -> torch.Tensor:
        q = torch.zeros(len(case.q), heads, case.q.shape[2], dtype=case.q.dtype, device=case.device)
        q[:, : case.heads] = case.q
        return q

    return pad


def _padded_sink(case: V4PrefillCase) -> torch.Tensor:
    import torch.nn.functional as F

    return F.pad(case.sink, (0, (padded_heads(case.heads) or 0) - case.heads))


def _workspace(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """[window tokens; compressed tokens] in bf16, gathered from both pools into one tensor."""
    import torch

    window, extra = case.window_slots, case.extra_slots
    shape = (len(window) + len(extra), case.profile.latent)

    def gather() -> torch.Tensor:
        both = torch.empty(shape, dtype=torch.bfloat16, device=case.device)
        case.window_pool.read(window, both[: len(window)])
        case.extra_pool.read(extra, both[len(window) :])
        return both

    return gather


def _build_sparse_fwd(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """flash_mla_sparse_fwd over a dequantized copy."""
    from nsa_tune.backend.kernels.combine_indices import combine_indices

    gather, pad, sink = _workspace(case), _padded(case), _padded_sink(case)
    window, extra = case.window_indices, case.extra_indices
    shift, scale = len(case.window_slots), case.profile.softmax_scale

    def run() -> torch.Tensor:
        kv = gather()
        indices, lengths = combine_indices(
            window, case.window_lengths, extra, case.extra_lengths, shift
        )
        out = flash_mla.sparse_forward(pad(), kv[:, None], indices[:, None], scale, lengths, sink)
        return out[:, : case.heads]

    return run


def _with_kvcache(case: V4PrefillCase, schedule: Callable[[], Any]) -> Callable[[], torch.Tensor]:
    """flash_mla_with_kvcache over both pools."""
    from nsa_tune.backend.points.paging import placed

    pad, sink = _padded(case), _padded_sink(case)
    indices = placed(case.window_indices, case.window_slots)[:, None]
    extra = placed(case.extra_indices, case.extra_slots)[:, None]
    # As SGLang passes them: no query has an extra length of 0, the index -1 stands for none.
    lengths, extra_lengths = case.window_lengths, case.extra_lengths.clamp_min(1)

    def run() -> torch.Tensor:
        out = flash_mla.sparse_decode(
            pad()[:, None], case.window_pool.rows, indices, case.profile.softmax_scale, schedule(),
            topk_length=lengths, attn_sink=sink, extra_k_cache=case.extra_pool.rows,
            extra_indices_in_kvcache=extra, extra_topk_length=extra_lengths,
        )  # fmt: skip
        return out[:, 0, : case.heads]

    return run


_build_with_kvcache, _first_with_kvcache = per_pass(_with_kvcache)


def _attend(
    case: V4PrefillCase, gather: Callable[[slice], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Softmax with a sink over what `gather` gives for a slice of queries: keys [rows, columns,
    latent] and which of them count [rows, columns]."""
    import torch

    out = torch.empty_like(case.q)
    columns = case.window_indices.shape[1] + case.extra_indices.shape[1]
    step = max(_GATHERED_AT_ONCE // columns, 1)
    sink = case.sink[None, :, None]
    for start in range(0, len(case.q), step):
        rows = slice(start, start + step)
        keys, counts = gather(rows)
        scores = torch.einsum("rhc,rkc->rhk", case.q[rows], keys).float()
        scores = (scores * case.profile.softmax_scale).masked_fill(~counts[:, None], -torch.inf)
        every = torch.cat((scores, sink.expand(len(scores), -1, 1)), dim=-1).softmax(-1)
        out[rows] = torch.einsum("rhk,rkc->rhc", every[..., :-1].to(keys.dtype), keys)
    return out


def _build_torch_sparse(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """The order of sparse_fwd in torch: read everything back, then select from it."""
    import torch

    workspace, shift = _workspace(case), len(case.window_slots)

    def run() -> torch.Tensor:
        both = workspace()

        def select(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            window, extra = case.window_indices[rows], case.extra_indices[rows]
            chosen = torch.cat((window, torch.where(extra >= 0, extra + shift, -1)), dim=1)
            return both[chosen.clamp_min(0).long()], chosen >= 0

        return _attend(case, select)

    return run


def _build_torch_kv(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """The order of with_kvcache in torch: select from the pools, then widen the selection."""
    import torch

    from nsa_tune.backend.points.paging import placed

    window = placed(case.window_indices, case.window_slots)
    extra = placed(case.extra_indices, case.extra_slots)

    def select(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        parts, counts = [], []
        for pool, indices in ((case.window_pool, window[rows]), (case.extra_pool, extra[rows])):
            values = pool.read(indices.clamp_min(0).flatten())
            parts.append(values.view(*indices.shape, -1))
            counts.append(indices >= 0)
        return torch.cat(parts, dim=1), torch.cat(counts, dim=1)

    return lambda: _attend(case, select)


def arms_of(ratio: int) -> tuple[Arm, ...]:
    """The arms in layers of one compression ratio."""
    both = (ratio_guard(ratio), indices_guard(ratio))
    paged = (SOME_ROWS, *both, COLUMNS, *DECODE_ROWS)
    gathers = (SOME_ROWS, *both, workspace_guard(ratio))
    return (
        SparseArm(
            "sparse_fwd", _build_sparse_fwd, _V4, "flash_mla", ARCHS, gathers,
            features=OF_SPARSE_FWD, copied={KVLayout.V4_PAGED: "v4_paged.dequantize"},
        ),
        SparseArm(
            "with_kvcache", _build_with_kvcache, _V4, "flash_mla", ARCHS, paged,
            features=OF_WITH_KVCACHE, surcharge=schedule_surcharge, first=_first_with_kvcache,
            copied={},
        ),
        Arm("torch_sparse", _build_torch_sparse, _V4, guards=both[:1], reference=True),
        Arm("torch_kv", _build_torch_kv, _V4, guards=both[:1], reference=True),
    )  # fmt: skip
