"""Decision points `v4_prefill_c4` and `v4_prefill_c128`: how a DeepSeek V4 prefill attends to its
window and its compressed tokens, in the layers of either compression ratio.

An arm is everything that only its way costs in one layer. `sparse_fwd` gathers and dequantizes
[window; compressed] into a bf16 workspace, combines both index lists into one and runs the prefill
kernel, whatever the number of queries; its cost grows with history. `with_kvcache` runs the decode
kernel over the two paged pools, one row a query. The two ratios are two points, because a layer
has one of them and their answers differ; the batches are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsa_tune.backend.points import guards
from nsa_tune.backend.points.v4_prefill import terms as work
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Answer, Arm, Case, Guard, Point, Setting

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.v4_prefill.case import V4PrefillCase

__all__ = ["V4_PREFILL"]

_RATIOS = (4, 128)
_GATHERED_AT_ONCE = 2**16
_INT32 = 2**31


def _padded(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """q with as many heads as FlashMLA computes, zero in those that are not there."""
    import torch

    heads = guards.padded_heads(case.heads)
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

    return F.pad(case.sink, (0, (guards.padded_heads(case.heads) or 0) - case.heads))


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
    from nsa_tune.backend.libraries.flash_mla import calls as flash_mla

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


def _build_with_kvcache(case: V4PrefillCase) -> Callable[[], torch.Tensor]:
    """flash_mla_with_kvcache over both pools."""
    from nsa_tune.backend.libraries.flash_mla import calls as flash_mla

    pad, sink = _padded(case), _padded_sink(case)
    indices = case.paged(case.window_indices, case.window_slots)[:, None]
    extra = case.paged(case.extra_indices, case.extra_slots)[:, None]
    # As SGLang passes them: no query has an extra length of 0, the index -1 stands for none.
    lengths, extra_lengths = case.window_lengths, case.extra_lengths.clamp_min(1)

    def run() -> torch.Tensor:
        out = flash_mla.sparse_decode_two_pools(
            pad()[:, None], case.window_pool.rows, indices, lengths, case.extra_pool.rows, extra,
            extra_lengths, case.profile.softmax_scale, sink,
        )  # fmt: skip
        return out[:, 0, : case.heads]

    return run


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

    window = case.paged(case.window_indices, case.window_slots)
    extra = case.paged(case.extra_indices, case.extra_slots)

    def select(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        parts, counts = [], []
        for pool, indices in ((case.window_pool, window[rows]), (case.extra_pool, extra[rows])):
            values = pool.read(indices.clamp_min(0).flatten())
            parts.append(values.view(*indices.shape, -1))
            counts.append(indices >= 0)
        return torch.cat(parts, dim=1), torch.cat(counts, dim=1)

    return lambda: _attend(case, select)


# --- limits


def _ratio_guard(ratio: int) -> Guard:
    def check(batch: Batch, setting: Setting) -> str | None:
        del batch
        profile = setting.profile
        if ratio not in profile.ratios:
            return f"{profile.name} has no layers of compression ratio {ratio}"
        if profile.page_size % ratio:
            return f"pages of {profile.page_size} tokens do not hold whole groups of {ratio}"
        return None

    return Guard(
        "compress_ratio", "semantic", "SGLang 0.5.23 deepseek_v4_backend.py forward, 0, 4 or 128",
        check,
    )  # fmt: skip


def _whole_columns(batch: Batch, setting: Setting) -> str | None:
    del batch
    window, topk = setting.profile.window, setting.profile.index_topk
    if window % 64 or topk % 64:
        return f"flash_mla_with_kvcache needs window and topk % 64 == 0, got {window} and {topk}"
    return None


def _workspace_guard(ratio: int) -> Guard:
    def check(batch: Batch, setting: Setting) -> str | None:
        profile = setting.profile
        needed = 2 * profile.latent * sum(work.most_gathered(batch, setting, ratio))
        if setting.device.memory and needed > setting.device.memory // 4:
            return f"{needed / 2**30:.1f} GiB of workspace pass a quarter of the device's memory"
        return None

    return Guard("v4_workspace", "formula", "rank + rope bf16 values a gathered token", check)


def _indices_guard(ratio: int) -> Guard:
    def check(batch: Batch, setting: Setting) -> str | None:
        profile = setting.profile
        if guards.padded_heads(setting.heads) is None:
            return f"FlashMLA computes at most 128 heads, {setting.heads} given"
        # The combined indices are the wider ones: padded to a multiple of 128.
        width = profile.window + work.extra_width(profile, ratio, batch.max_kv) + 127
        if batch.q_tokens * width >= _INT32:
            return f"{batch.q_tokens} rows of {width} indices overflow FlashMLA's int32 offsets"
        return None

    return Guard(
        "v4_index_offsets", "formula",
        "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470, sparse_fp8/splitkv_mla.cuh:468", check,
    )  # fmt: skip


_COLUMNS = Guard(
    "topk_multiple_64", "formula", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689",
    _whole_columns,
)  # fmt: skip
_V4 = frozenset({KVLayout.V4_PAGED})
_FLASHMLA = frozenset({"sm90", "sm100"})


def _arms(ratio: int) -> tuple[Arm, ...]:
    both = (_ratio_guard(ratio), _indices_guard(ratio))
    paged = (
        guards.SOME_ROWS, *both, _COLUMNS, guards.FLASHMLA_SCHEDULE, guards.FLASHMLA_OFFSETS,
        guards.FLASHMLA_SCRATCH,
    )  # fmt: skip
    gathers = (guards.SOME_ROWS, *both, _workspace_guard(ratio))
    return (
        Arm("sparse_fwd", _build_sparse_fwd, _V4, "flash_mla", _FLASHMLA, gathers),
        Arm(
            "with_kvcache",
            _build_with_kvcache,
            _V4,
            "flash_mla",
            _FLASHMLA,
            paged,
            surcharge_us=guards.schedule_surcharge_us,
        ),
        Arm("torch_sparse", _build_torch_sparse, _V4, guards=both[:1], reference=True),
        Arm("torch_kv", _build_torch_kv, _V4, guards=both[:1], reference=True),
    )


def _case(ratio: int, batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.v4_prefill.case import v4_prefill_case

    return v4_prefill_case(batch, setting, ratio, device)


def _point(ratio: int) -> Point:
    name = f"v4_prefill_c{ratio}"
    arms = _arms(ratio)
    return Point(
        name=name,
        modes=frozenset({Mode.EXTEND}),
        arms=arms,
        answers=(Answer(name, {arm.name: (arm.name,) for arm in arms}),),
        terms=work.TERMS,
        cost_terms=partial(work.cost_terms, ratio=ratio),
        coordinates=work.COORDINATES,
        locate=partial(work.locate, ratio=ratio),
        sheet=lambda batch, setting: 0,
        grid=work.grid,
        case=partial(_case, ratio),
        sample=work.sample,
        families=frozenset({"v4"}),
        group="v4_prefill",
    )


V4_PREFILL: tuple[Point, ...] = tuple(map(_point, _RATIOS))
"""One point for each compression ratio."""
