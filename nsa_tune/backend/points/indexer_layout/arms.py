"""The arms of the indexer's logits: each layout by DeepGEMM, and in torch as its reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.libraries.deep_gemm.limits import (
    ARCHS,
    MQA_LOGITS_BYTES,
    MQA_SHAPE,
    NEXT_N_SM90,
)
from nsa_tune.backend.points.limits import SOME_ROWS, in_any_setting, whenever
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, Guard

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_layout.case import IndexerCase

STEPS = {"native": None, "pairs": 2, "flatten": 1}
"""Queries a row; native takes all next_n."""


def _deep_gemm(step: int | None, case: IndexerCase) -> Callable[[], torch.Tensor]:
    """DeepGEMM's paged MQA logits with `step` queries a row."""
    each = step or case.batch.next_n
    repeats = case.batch.next_n // each
    q = case.q.view(-1, each, *case.q.shape[2:])
    lens = case.context_lens.view(-1, each)
    table = case.block_table.repeat_interleave(repeats, dim=0)
    metadata = deep_gemm.schedule(lens, case.profile.page_size)
    return lambda: deep_gemm.paged_mqa_logits(
        q, case.pool, case.weights, lens, table, metadata, case.max_context
    )


def _torch(step: int | None, case: IndexerCase) -> Callable[[], torch.Tensor]:
    """The same in torch: each row gathers its keys and scores `step` queries against them."""
    import torch

    each = step or case.batch.next_n
    repeats = case.batch.next_n // each
    page, dim = case.profile.page_size, case.profile.index_dim
    flat = case.pool.view(case.pool.shape[0], page * (dim + 4))
    q = case.q.view(-1, each, *case.q.shape[2:])
    weights = case.weights.view(-1, each, case.weights.shape[1])
    lens = case.context_lens.view(-1, each)

    def run() -> torch.Tensor:
        out = torch.zeros(*lens.shape, case.max_context, device=case.device)
        for row in range(lens.shape[0]):
            seen = int(lens[row, -1])
            pages = flat[case.block_table[row // repeats, : -(-seen // page)].long()]
            keys = pages[:, : page * dim].contiguous().view(torch.float8_e4m3fn)
            scales = pages[:, page * dim :].contiguous().view(torch.float32).flatten()
            scores = torch.einsum("nhd,kd->nhk", q[row].float(), keys.float().view(-1, dim))
            logits = torch.einsum("nhk,nh->nk", scores.relu(), weights[row]) * scales
            out[row, :, :seen] = logits[:, :seen]
        return out.flatten(0, 1)

    return run


_PAIRS = Guard(
    "pairs_even", "semantic", "2 queries a row; with next_n 2 it is native itself",
    in_any_setting(
        lambda batch: (
            None
            if batch.next_n >= 4 and batch.next_n % 2 == 0
            else f"pairs split an even next_n of 4 or more, {batch.next_n} given"
        )
    ),
)  # fmt: skip
_FLATTEN = Guard(
    "flatten_splits", "semantic", "1 query a row; with next_n 1 it is native itself",
    whenever(lambda batch: batch.next_n <= 1, "with next_n 1 flatten is native itself"),
)  # fmt: skip
_SPLITS: dict[str, tuple[Guard, ...]] = {"native": (), "pairs": (_PAIRS,), "flatten": (_FLATTEN,)}
_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})


def _arms() -> tuple[Arm, ...]:
    arms = []
    for name, step in STEPS.items():
        limits = (*_SPLITS[name], SOME_ROWS, MQA_LOGITS_BYTES)
        kernel = (*limits, MQA_SHAPE)
        if name == "native":
            kernel = (*kernel, NEXT_N_SM90)
        build = partial(_deep_gemm, step)
        arms.append(Arm(f"{name}/deep_gemm", build, _ANY, "deep_gemm", ARCHS, kernel))
    for name, step in STEPS.items():
        limits = (*_SPLITS[name], MQA_LOGITS_BYTES)
        build = partial(_torch, step)
        arms.append(Arm(f"{name}/torch", build, _ANY, guards=limits, reference=True))
    return tuple(arms)


ARMS = _arms()
