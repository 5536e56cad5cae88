"""FlashInfer's limits: head widths by backend, work items of its plans, TRT-LLM's workspace."""

from __future__ import annotations

from nsa_tune.backend.libraries.limits import at_most, at_most_rows
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting

WORKSPACE_BYTES = 128 * 2**20
"""Float workspace of the wrappers for FA2 and FA3."""
WORKSPACE_BYTES_TRTLLM = 512 * 2**20
_INT_WORKSPACE = 8 * 2**20


def _fa3_works(setting: Setting) -> Limit:
    heads = setting.heads
    most = (_INT_WORKSPACE - 4 * (setting.device.sms + 1) - 128) // 28

    def works(batch: Batch) -> int:
        # At most one tile of 128 queries more a sequence than the queries fill. Above 4096 of them
        # the plan makes one schedule for all heads.
        tiles = batch.q_tokens // 128 + batch.batch_size
        return tiles * heads if tiles <= 4097 else tiles

    why = f"work items pass the {most} that FlashInfer's fa3 plan has room for"
    return at_most(most, works, lambda count: f"up to {count} {why}")


def _fa2_plan_bytes(batch: Batch) -> int:
    """Three int32 a tile of at least 16 queries, one a row to merge, and sequences' offsets."""
    rows, sequences = batch.q_tokens, batch.batch_size
    return 4 * (3 * (rows // 16 + sequences) + rows + 2 * (sequences + 1))


_RAGGED_WIDTHS = {(64, 64), (128, 128), (256, 256), (192, 128)}


def _ragged_shape(setting: Setting) -> str | None:
    profile = setting.profile
    widths = (profile.nope + profile.rope, profile.v)
    if widths in _RAGGED_WIDTHS:
        return None
    return f"FlashInfer's ragged attention has no kernels for head widths {widths}"


def _ragged_workspace(setting: Setting) -> Limit:
    heads = setting.heads

    def needed(batch: Batch) -> int:
        longest = max(batch.new_lens) if batch.new_lens else min(batch.q_tokens, batch.max_kv)
        statistics = 8 * heads * batch.batch_size * ((longest + 255) // 256) * 256
        return statistics + 8 * 2**20 + 2**20

    return at_most(
        WORKSPACE_BYTES_TRTLLM, needed,
        lambda size: (
            f"TRT-LLM's ragged attention needs {size / 2**20:.0f} MiB of workspace, "
            f"it has {WORKSPACE_BYTES_TRTLLM // 2**20}"
        ),
    )  # fmt: skip


def _trtllm_sparse_shape(setting: Setting) -> str | None:
    profile = setting.profile
    if (
        (profile.rank, profile.rope, profile.nope) == (512, 64, 128)
        and setting.heads <= 128
        and profile.index_topk % 4 == 0
        and profile.page_size in (32, 64)
    ):
        return None
    return (
        "TRT-LLM's sparse MLA takes latents of 512 + 64, nope 128, up to 128 heads, topk % 4 == 0 "
        "and pages of 32 or 64"
    )


def _mla_shape(setting: Setting) -> str | None:
    profile = setting.profile
    if (profile.rank, profile.rope) == (512, 64):
        return None
    return f"FlashInfer's MLA takes latents of 512 + 64, not {profile.rank} + {profile.rope}"


def _mla_works(setting: Setting) -> Limit:
    heads, most = setting.heads, 16384 - setting.device.sms

    def works(batch: Batch) -> int:
        # Tiles of one block, or of two that share them where a sequence has more; as many parts
        # more as there are blocks. The plan does not check the room for them.
        pairs = batch.q_tokens * heads
        width = 128 if pairs > 65 * batch.batch_size - 1 else 64
        return pairs // width + batch.batch_size

    why = f"work items pass the {most} that FlashInfer's MLA plan has room for"
    return at_most(most, works, lambda count: f"up to {count} {why}")


_FILTERED_TOPK = 2048
"""FILTERED_TOPK_MAX_K."""


def _topk_works(setting: Setting) -> Limit | str:
    topk = setting.profile.index_topk
    if topk > _FILTERED_TOPK:
        return f"FlashInfer's graph-safe top-k selects up to {_FILTERED_TOPK}, not {topk}"
    most = (2**32 - 1) // topk
    return at_most_rows(most, f"of {topk} pass the 32-bit offsets of FlashInfer's top-k")


FA3_WORKS = Guard(
    "fa3_works", "formula", "FlashInfer scheduler.cuh:870 PrefillSM90Plan, 8 MiB int workspace",
    _fa3_works,
)  # fmt: skip
FA2_WORKS = Guard(
    "fa2_works", "formula", "FlashInfer scheduler.cuh PrefillPlan, 8 MiB int workspace",
    lambda setting: at_most(
        _INT_WORKSPACE, _fa2_plan_bytes,
        lambda size: (
            f"a plan of {size} bytes passes the {_INT_WORKSPACE} of FlashInfer's int workspace"
        ),
    ),
)  # fmt: skip
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
MLA_WORKS = (
    Guard("mla_shape", "formula", "FlashInfer jit/attention: MLA of head dims 512, 64", _mla_shape),
    Guard(
        "mla_works", "formula", "FlashInfer scheduler.cuh MLAPlan max_total_num_works", _mla_works
    ),
)  # fmt: skip
"""Of BatchMLAPagedAttentionWrapper."""
TOPK_WORKS = Guard(
    "flashinfer_topk", "formula",
    "FlashInfer 0.6.15 topk.cuh FILTERED_TOPK_MAX_K; FilteredTopKUnifiedKernel bid * top_k",
    _topk_works,
)  # fmt: skip
