"""The ways to a prefill's logits, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nsa_tune.backend.libraries.deep_gemm import calls
from nsa_tune.backend.libraries.deep_gemm import limits as deep_gemm
from nsa_tune.backend.points import limits
from nsa_tune.backend.points.indexer_prefill import features
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, Guard, Limit, Setting

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_prefill.case import LogitsCase


def _build_ragged(case: LogitsCase) -> Callable[[], torch.Tensor]:
    """fp8_mqa_logits over the gathered keys of all sequences."""
    from nsa_tune.backend.kernels.gather_keys import gather_keys

    def run() -> torch.Tensor:
        keys, scales = gather_keys(case.pool, case.slots)
        return calls.ragged_mqa_logits(
            case.q, keys, scales, case.weights, case.first, case.end
        )  # fmt: skip

    return run


def chunks(case: LogitsCase) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, logits) of one part of the rows after the other; gathers the keys first."""
    from nsa_tune.backend.kernels.gather_keys import gather_keys

    keys, scales = gather_keys(case.pool, case.slots)
    for start in range(0, case.batch.q_tokens, case.rows_a_chunk):
        part = slice(start, start + case.rows_a_chunk)
        yield (
            start,
            calls.ragged_mqa_logits(
                case.q[part], keys, scales, case.weights[part], case.first[part], case.end[part]
            ),
        )


def _build_chunked(case: LogitsCase) -> Callable[[], torch.Tensor]:
    """As ragged, part by part; each part's logits take the place of those before them."""

    def run() -> torch.Tensor:
        parts = chunks(case)
        _, logits = next(parts)
        for _, later in parts:
            logits = later
        return logits

    return run


def _build_paged(case: LogitsCase) -> Callable[[], torch.Tensor]:
    """fp8_paged_mqa_logits with a row for each query."""
    from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule

    lens, table, arch = case.lengths[:, None], case.block_table, case.setting.device.arch
    # Ours takes any number of rows, and gives the same bits as DeepGEMM's.
    schedule = mqa_schedule(lens, calls.sms(), calls.schedule_split(arch))
    q, longest = case.q[:, None], case.batch.max_kv
    return lambda: calls.paged_mqa_logits(
        q, case.pool, case.weights, lens, table, schedule, longest
    )[:, :longest]


def _build_torch(case: LogitsCase) -> Callable[[], torch.Tensor]:
    """Sequence by sequence in torch, over gathered keys."""
    import torch

    from nsa_tune.backend.kernels.gather_keys import gather_keys_reference

    def run() -> torch.Tensor:
        keys, scales = gather_keys_reference(case.pool, case.slots)
        out = torch.zeros(case.batch.q_tokens, len(keys), device=case.device)
        row = 0
        for begin, end, new in case.sequences:
            rows, seen = slice(row, row + new), slice(begin, end)
            scores = torch.einsum("qhd,kd->qhk", case.q[rows].float(), keys[seen].float())
            logits = torch.einsum("qhk,qh->qk", scores.relu(), case.weights[rows])
            out[rows, seen] = logits * scales[seen]
            row += new
        return out

    return run


def _several_chunks(setting: Setting) -> Limit:
    most = features.chunk_bytes(setting)

    def limit(batch: Batch) -> str | None:
        if deep_gemm.ragged_logits_bytes(batch) > most:
            return None
        return f"the logits fit into {most} bytes, and one chunk is ragged itself"

    return limit


_SEVERAL_CHUNKS = Guard(
    "several_chunks", "semantic", "with all rows in one chunk it is ragged itself", _several_chunks
)
# The indexer's keys are e4m3, whatever the layout of the latents.
_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
_LIMITS = (limits.SOME_ROWS, limits.NOTHING_TO_SELECT)
_KERNEL = (*_LIMITS, deep_gemm.MQA_SHAPE)

ARMS = (
    Arm(
        "ragged", _build_ragged, _ANY, "deep_gemm", deep_gemm.ARCHS,
        (*_KERNEL, deep_gemm.RAGGED_LOGITS_BYTES), features=features.OF_RAGGED,
    ),
    Arm(
        "paged", _build_paged, _ANY, "deep_gemm", deep_gemm.ARCHS,
        (*_KERNEL, deep_gemm.MQA_LOGITS_BYTES), features=features.OF_PAGED,
    ),
    Arm(
        "chunked", _build_chunked, _ANY, "deep_gemm", deep_gemm.ARCHS, (*_KERNEL, _SEVERAL_CHUNKS),
        features=features.OF_CHUNKED,
    ),
    Arm(
        "torch", _build_torch, _ANY, guards=(*_LIMITS, deep_gemm.RAGGED_LOGITS_BYTES),
        reference=True, features=features.OF_RAGGED,
    ),
)  # fmt: skip
