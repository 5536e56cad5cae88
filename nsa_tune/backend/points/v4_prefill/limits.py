"""Hard limits of V4's prefill: ratios, columns of indices, the workspace."""

from __future__ import annotations

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads, too_many_heads
from nsa_tune.backend.libraries.limits import quarter_of_memory
from nsa_tune.backend.points.v4_prefill import features
from nsa_tune.backend.types.formula import Limit
from nsa_tune.backend.types.point import Guard, Setting

_INT32 = 2**31


def ratio_guard(ratio: int) -> Guard:
    """The model has layers of this ratio, and a page holds whole groups of it."""

    def limits(setting: Setting) -> tuple[Limit, ...]:
        profile = setting.profile
        if ratio not in profile.ratios:
            return (Limit("True", f"{profile.name} has no layers of compression ratio {ratio}"),)
        if profile.page_size % ratio:
            why = f"pages of {profile.page_size} tokens do not hold whole groups of {ratio}"
            return (Limit("True", why),)
        return ()

    return Guard(
        "compress_ratio", "semantic", "SGLang 0.5.23 deepseek_v4_backend.py forward, 0, 4 or 128",
        limits,
    )  # fmt: skip


def _whole_columns(setting: Setting) -> tuple[Limit, ...]:
    window, topk = setting.profile.window, setting.profile.index_topk
    if window % 64 == topk % 64 == 0:
        return ()
    why = f"flash_mla_with_kvcache needs window and topk % 64 == 0, got {window} and {topk}"
    return (Limit("True", why),)


def workspace_guard(ratio: int) -> Guard:
    """What is dequantized fits into the memory."""

    def limits(setting: Setting) -> tuple[Limit, ...]:
        profile = setting.profile
        needed = f"{2 * profile.latent} * {features.most_gathered(profile.window, ratio)}"
        return quarter_of_memory(needed, "workspace", setting)

    return Guard("v4_workspace", "formula", "rank + rope bf16 values a gathered token", limits)


def indices_guard(ratio: int) -> Guard:
    """The rows of indices fit into int32 offsets."""

    def limits(setting: Setting) -> tuple[Limit, ...]:
        profile = setting.profile
        if padded_heads(setting.heads) is None:
            return (too_many_heads(setting),)
        # The combined indices are the wider ones: padded to a multiple of 128.
        width = f"({profile.window + 127} + {features.extra_width(profile, ratio)})"
        why = f"{{q_tokens}} rows of {{{width}}} indices overflow FlashMLA's int32 offsets"
        return (Limit(f"q_tokens * {width} >= {_INT32}", why),)

    return Guard(
        "v4_index_offsets", "formula",
        "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470, sparse_fp8/splitkv_mla.cuh:468", limits,
    )  # fmt: skip


COLUMNS = Guard(
    "topk_multiple_64", "formula", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689",
    _whole_columns,
)  # fmt: skip
