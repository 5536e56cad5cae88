"""Hard limits of V4's prefill: ratios, columns of indices, the workspace."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads, too_many_heads
from nsa_tune.backend.libraries.limits import quarter_of_memory
from nsa_tune.backend.points.v4_prefill import features
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting

_INT32 = 2**31


def ratio_guard(ratio: int) -> Guard:
    """The model has layers of this ratio, and a page holds whole groups of it."""

    def limit(setting: Setting) -> str | None:
        profile = setting.profile
        if ratio not in profile.ratios:
            return f"{profile.name} has no layers of compression ratio {ratio}"
        if profile.page_size % ratio:
            return f"pages of {profile.page_size} tokens do not hold whole groups of {ratio}"
        return None

    return Guard(
        "compress_ratio", "semantic", "SGLang 0.5.23 deepseek_v4_backend.py forward, 0, 4 or 128",
        limit,
    )  # fmt: skip


def _whole_columns(setting: Setting) -> str | None:
    window, topk = setting.profile.window, setting.profile.index_topk
    if window % 64 == topk % 64 == 0:
        return None
    return f"flash_mla_with_kvcache needs window and topk % 64 == 0, got {window} and {topk}"


def workspace_guard(ratio: int) -> Guard:
    """What is dequantized fits into the memory."""

    def limit(setting: Setting) -> Limit | None:
        profile = setting.profile

        def needed(batch: Batch) -> int:
            return 2 * profile.latent * features.most_gathered(batch, profile.window, ratio)

        return quarter_of_memory(needed, "workspace", setting)

    return Guard("v4_workspace", "formula", "rank + rope bf16 values a gathered token", limit)


def indices_guard(ratio: int) -> Guard:
    """The rows of indices fit into int32 offsets."""

    def limit(setting: Setting) -> Limit | str:
        if padded_heads(setting.heads) is None:
            return too_many_heads(setting)
        profile = setting.profile

        def offsets(batch: Batch) -> str | None:
            # The combined indices are the wider ones: padded to a multiple of 128.
            width = profile.window + 127 + features.extra_width(profile, ratio, batch.max_kv)
            if batch.q_tokens * width < _INT32:
                return None
            rows = batch.q_tokens
            return f"{rows} rows of {width} indices overflow FlashMLA's int32 offsets"

        return offsets

    return Guard(
        "v4_index_offsets", "formula",
        "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470, sparse_fp8/splitkv_mla.cuh:468", limit,
    )  # fmt: skip


COLUMNS = Guard(
    "topk_multiple_64", "formula", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689",
    _whole_columns,
)  # fmt: skip
