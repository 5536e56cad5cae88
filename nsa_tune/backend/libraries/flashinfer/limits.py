"""FlashInfer's limits: head widths by backend, work items of its plans, TRT-LLM's workspace."""

from __future__ import annotations

from nsa_tune.backend.types.formula import Limit
from nsa_tune.backend.types.point import Guard, Setting

WORKSPACE_BYTES = 128 * 2**20
"""Float workspace of the wrappers for FA2 and FA3."""
WORKSPACE_BYTES_TRTLLM = 512 * 2**20
_INT_WORKSPACE = 8 * 2**20


def _fa3_works(setting: Setting) -> tuple[Limit, ...]:
    # At most one tile of 128 queries more a sequence than the queries fill.
    tiles = "(q_tokens // 128 + batch_size)"
    # Above 4096 of them the plan makes one schedule for all heads.
    works = f"{tiles} * ({setting.heads} if {tiles} <= 4097 else 1)"
    most = (_INT_WORKSPACE - 4 * (setting.device.sms + 1) - 128) // 28
    why = f"up to {{{works}}} work items pass the {most} that FlashInfer's fa3 plan has room for"
    # The first part alone costs a plan time: few batches pass it.
    return (Limit(f"{tiles} > {most // setting.heads} and {works} > {most}", why),)


def _fa2_works(setting: Setting) -> tuple[Limit, ...]:
    del setting
    # Three int32 a tile of at least 16 queries, one a row to merge, and the sequences' offsets.
    needed = "4 * (3 * (q_tokens // 16 + batch_size) + q_tokens + 2 * (batch_size + 1))"
    why = f"a plan of {{{needed}}} bytes passes the {_INT_WORKSPACE} of FlashInfer's int workspace"
    # As above: no sequence is without a query, so nothing below this many passes the limit.
    small = (_INT_WORKSPACE // 4 - 2) * 16 // (16 + 3 + 5 * 16)
    return (Limit(f"q_tokens > {small} and {needed} > {_INT_WORKSPACE}", why),)


_RAGGED_WIDTHS = {(64, 64), (128, 128), (256, 256), (192, 128)}


def _ragged_shape(setting: Setting) -> tuple[Limit, ...]:
    profile = setting.profile
    widths = (profile.nope + profile.rope, profile.v)
    if widths in _RAGGED_WIDTHS:
        return ()
    why = f"FlashInfer's ragged attention has no kernels for head widths {widths}"
    return (Limit("True", why),)


def _ragged_workspace(setting: Setting) -> tuple[Limit, ...]:
    stats = f"{8 * setting.heads} * batch_size * ((max_new + 255) // 256) * 256"
    needed = f"({stats} + {8 * 2**20 + 2**20})"
    why = (
        f"TRT-LLM's ragged attention needs {{{needed} / 1048576:.0f}} MiB of workspace, "
        f"it has {WORKSPACE_BYTES_TRTLLM // 2**20}"
    )
    return (Limit(f"{needed} > {WORKSPACE_BYTES_TRTLLM}", why),)


def _trtllm_sparse_shape(setting: Setting) -> tuple[Limit, ...]:
    profile = setting.profile
    if (
        (profile.rank, profile.rope, profile.nope) == (512, 64, 128)
        and setting.heads <= 128
        and profile.index_topk % 4 == 0
        and profile.page_size in (32, 64)
    ):
        return ()
    why = (
        "TRT-LLM's sparse MLA takes latents of 512 + 64, nope 128, up to 128 heads, topk % 4 == 0 "
        "and pages of 32 or 64"
    )
    return (Limit("True", why),)


_FILTERED_TOPK = 2048
"""FILTERED_TOPK_MAX_K."""


def _topk_works(setting: Setting) -> tuple[Limit, ...]:
    topk = setting.profile.index_topk
    if topk > _FILTERED_TOPK:
        why = f"FlashInfer's graph-safe top-k selects up to {_FILTERED_TOPK}, not {topk}"
        return (Limit("True", why),)
    why = f"{{q_tokens}} rows of {topk} pass the 32-bit offsets of FlashInfer's top-k"
    return (Limit(f"q_tokens * {topk} >= {2**32}", why),)


FA3_WORKS = Guard(
    "fa3_works", "formula", "FlashInfer scheduler.cuh:870 PrefillSM90Plan, 8 MiB int workspace",
    _fa3_works,
)  # fmt: skip
FA2_WORKS = Guard(
    "fa2_works", "formula", "FlashInfer scheduler.cuh PrefillPlan, 8 MiB int workspace", _fa2_works
)
RAGGED_SHAPE = Guard(
    "ragged_shape", "formula", "FlashInfer prefill.py BatchPrefillWithRaggedKVCacheWrapper",
    _ragged_shape,
)  # fmt: skip
TRTLLM_RAGGED_WORKSPACE = Guard(
    "trtllm_ragged_workspace", "formula",
    "FlashInfer 0.6.12 trtllm_fmha_kernel_launcher.cu: 8 MiB counters, 8 * heads * sequences * "
    "longest, 1 MiB",
    _ragged_workspace,
)  # fmt: skip
TRTLLM_SPARSE_SHAPE = Guard(
    "trtllm_sparse_shape", "formula", "FlashInfer 0.6.12 mla/_core.py:1054 sparse_mla_top_k",
    _trtllm_sparse_shape,
)  # fmt: skip
TOPK_WORKS = Guard(
    "flashinfer_topk", "formula",
    "FlashInfer 0.6.15 topk.cuh FILTERED_TOPK_MAX_K; FilteredTopKUnifiedKernel bid * top_k",
    _topk_works,
)  # fmt: skip
