"""FlashMLA's limits: its schedule kernel by build, int32 offsets, shapes and scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from nsa_tune.backend.libraries.limits import (
    at_most,
    at_most_rows,
    bound,
    index_offsets,
    quarter_of_memory,
    rows_in_quarter_of_memory,
)
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Guard, Limit, Setting

ARCHS = frozenset({"sm90", "sm100"})
"""Architectures that both sparse kernels exist for."""
INT32 = 2**31
_OVERFLOW = "overflow {} int32 index offsets"
_SLOW_NS_PER_ROW = 318
"""`nsa-tune probe` on an H100 with sgl-flash-mla 1.0.0: 6.2 ms more at 19371 rows."""


def padded_heads(heads: int) -> int | None:
    """Heads that FlashMLA computes for `heads` local ones: 64 or 128; None above 128."""
    return 64 if heads <= 64 else 128 if heads <= 128 else None


def split_parts(setting: Setting) -> int:
    """Parts into which the sparse decode kernel splits its rows: one for each 64 heads of an SM."""
    return max(setting.device.sms // ((padded_heads(setting.heads) or 128) // 64), 1)


# --- the schedule kernel


@dataclass(frozen=True, slots=True)
class ScheduleBuild:
    """FlashMLA's schedule kernel in one build.

    One block takes 4 * (a * rows + 1 + per_part * SMs) bytes of shared memory.
    """

    distribution: str
    version: str
    """What the version begins with; another one is a build that nobody has looked at."""
    archs: frozenset[str]
    a: int
    past: str
    """What happens past the limit."""
    survives: bool
    """Whether that is slow and right; otherwise it is death."""
    per_part: int = 0
    most_bytes: int | None = None
    """None: what a block may opt in to on the device."""

    def rows(self, setting: Setting) -> int:
        """Most rows that fit."""
        device = setting.device
        memory = device.shared_memory_optin if self.most_bytes is None else self.most_bytes
        return max((memory // 4 - 1 - self.per_part * device.sms) // self.a, 0)


_SM90, _SM100 = frozenset({"sm90"}), frozenset({"sm100", "sm103"})
_BOTH = _SM90 | _SM100
_SLOW = "falls back to one thread"

# First that is installed wins, which is also the order in which `flash_mla` is resolved.
SCHEDULE_BUILDS = (
    ScheduleBuild("sgl-flash-mla", "1.", _SM90, 3, _SLOW, True),
    ScheduleBuild("sgl-flash-mla", "1.", _SM100, 4, "raises", False),
    ScheduleBuild("sglang-kernel", "0.4.", _BOTH, 5, _SLOW, True),
    ScheduleBuild("sgl-kernel", "0.", _BOTH, 5, _SLOW, True),
    ScheduleBuild("flash-mla", "1.", _BOTH, 5, "ends the process", False),
    # vLLM brings a build of its own of upstream's sources.
    ScheduleBuild("vllm", "0.", _BOTH, 5, "ends the process", False),
    # SGLang's own replacement (dsv4/flashmla_sched_meta.py) stays under what needs no opt-in.
    ScheduleBuild(
        "sglang", "0.5.", _SM100, 5, "hands over to FlashMLA's", False, 8, 49152
    ),
)  # fmt: skip
"""4 * (2b + 1) until September 2025, 4 * (5b + 1) since, 4 * (3b + 1) in sgl-flash-mla's build for
Hopper; upstream's ends the process, SGLang's goes on with one thread."""


def schedule_build(setting: Setting) -> ScheduleBuild | None:
    """The build that answers for `flash_mla` in `setting`, or None for one nobody has looked at."""
    installed = [build for build in SCHEDULE_BUILDS if build.distribution in setting.libraries]
    for build in installed:
        if (
            build.distribution == installed[0].distribution
            and setting.libraries[build.distribution].startswith(build.version)
            and setting.device.arch in build.archs
        ):
            return build
    return None


def schedule_rows(setting: Setting) -> int | None:
    """Most rows that are scheduled at full speed, by formula and probe; None where unknown."""
    build = schedule_build(setting)
    formula = None if build is None else build.rows(setting)
    # Upstream's first build takes two ints a row, the least of all.
    most = setting.device.shared_memory_optin // 8
    return bound(setting, "flashmla_schedule_rows", formula, most)


def _schedule(setting: Setting) -> Limit | str | None:
    build, most = schedule_build(setting), schedule_rows(setting)
    if most is None:
        return "no known build of flash_mla answers here, so its schedule limit is unknown"
    if build is not None and build.survives and most > 0:
        return None
    past = f", where {build.distribution} {build.past}" if build is not None else ""
    return at_most_rows(most, f"pass FlashMLA's schedule limit of {most}{past}")


def schedule_surcharge(setting: Setting) -> Callable[[Batch], float]:
    """The microseconds that a schedule takes more beyond the cliff of a build that survives it: a
    layer's share, as it is computed once a pass."""
    most = schedule_rows(setting)
    if most is None:
        return lambda batch: 0.0
    per_row = setting.limits.get("flashmla_schedule_ns_per_row", _SLOW_NS_PER_ROW)
    share_us = per_row / 1e3 / setting.sharing
    return lambda batch: 0.0 if batch.q_tokens <= most else batch.q_tokens * share_us


# --- offsets, memory and shapes


def _decode_offsets(setting: Setting) -> Limit | str:
    heads = padded_heads(setting.heads)
    if heads is None:
        return too_many_heads(setting)
    formula = (INT32 - 1) // (heads * 512) - split_parts(setting)
    rows = min(setting.limits.get("flashmla_decode_rows", formula), formula)
    why = f"of {heads} heads pass {rows}, behind which FlashMLA's int32 split offsets overflow"
    # The rows' selections overflow later.
    return at_most_rows(rows, why)


def _mixed_offsets(setting: Setting) -> Limit | str:
    heads = padded_heads(setting.heads)
    if heads is None:
        return too_many_heads(setting)
    # One row of all queries, in one part once they fill the device: twice the queries.
    most = (INT32 - 1) // (heads * 512) // 2
    why = f"in one row pass {most}, behind which FlashMLA's int32 split offsets overflow"
    queries = attrgetter("q_tokens")
    return at_most(most, queries, lambda count: f"{count} queries of {heads} heads {why}")


def too_many_heads(setting: Setting) -> str:
    """The clause against every batch with more heads than FlashMLA computes."""
    return f"FlashMLA computes at most 128 heads, {setting.heads} given"


def _scratch(setting: Setting, times: int = 1) -> Limit | None:
    heads = padded_heads(setting.heads) or 128
    what, more = "scratch memory of FlashMLA's decode kernel", split_parts(setting)
    return rows_in_quarter_of_memory(times * heads * (512 + 1) * 4, what, setting, more)


def _sparse_fwd_bytes(setting: Setting) -> Limit | None:
    heads, profile = padded_heads(setting.heads) or 128, setting.profile
    # q and the output in bf16, two fp32 statistics a head.
    row_bytes = heads * (2 * (profile.latent + profile.rank) + 8)
    return rows_in_quarter_of_memory(row_bytes, "operands of flash_mla_sparse_fwd", setting)


def _widened_bytes(setting: Setting) -> Limit | None:
    token_bytes = 2 * setting.profile.latent

    def needed(batch: Batch) -> int:
        # Without a prefix nothing is dequantized.
        return batch.kv_tokens * token_bytes if batch.prefix_tokens else 0

    packed = setting.layout is KVLayout.FP8_PACKED
    return quarter_of_memory(needed, "dequantized latents", setting) if packed else None


def _shape(setting: Setting) -> str | None:
    profile = setting.profile
    if (profile.rank, profile.rope) == (512, 64):
        return None
    return (
        f"FlashMLA's kernels take latents of 512 + 64 values, {profile.name} has "
        f"{profile.rank} + {profile.rope}"
    )


def multiple_of_topk(multiple: int, kernel: str, source: str) -> Guard:
    """The guard that `kernel` takes an index_topk that is a multiple of `multiple` only."""

    def limit(setting: Setting) -> str | None:
        topk = setting.profile.index_topk
        if topk % multiple == 0:
            return None
        return f"{kernel} needs topk % {multiple} == 0, got {topk}"

    return Guard(f"topk_multiple_{multiple}", "formula", source, limit)


FLASHMLA_SCHEDULE = Guard(
    "flashmla_schedule", "formula",
    "FlashMLA get_decoding_sched_meta.cu:109, 4*(5b+1); sgl-flash-mla 1.0.0 legacy 4*(3b+1)",
    _schedule,
)  # fmt: skip
FLASHMLA_OFFSETS = Guard(
    "flashmla_offsets", "formula",
    "FlashMLA csrc/smxx/decode/combine/combine.cu:46 (b + parts) * s_q * h * 512 < 2**31",
    _decode_offsets,
)  # fmt: skip
FLASHMLA_SCRATCH = Guard(
    "flashmla_scratch", "formula", "FlashMLA csrc/api/sparse_decode.h o_accum, lse_accum",
    _scratch,
)  # fmt: skip
MIXED_OFFSETS = Guard(
    "mixed_offsets", "formula",
    "FlashMLA csrc/smxx/decode/combine/combine.cu:46 with b = 1: (1 + parts) * s_q * h * 512",
    _mixed_offsets,
)  # fmt: skip
MIXED_SCRATCH = Guard(
    "mixed_scratch", "formula", "FlashMLA csrc/api/sparse_decode.h o_accum, lse_accum with b = 1",
    lambda setting: _scratch(setting, 2),
)  # fmt: skip
FLASHMLA_SHAPE = Guard(
    "flashmla_shape", "formula", "FlashMLA csrc/api/sparse_decode.h, sparse_fwd.h: d_qk 576",
    _shape,
)  # fmt: skip
SPARSE_FWD_OFFSETS = Guard(
    "sparse_fwd_offsets", "formula", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470",
    lambda setting: (
        too_many_heads(setting)
        if padded_heads(setting.heads) is None
        else index_offsets(setting, _OVERFLOW.format("flash_mla_sparse_fwd's"))
    ),
)  # fmt: skip
SPARSE_FWD_BYTES = Guard(
    "sparse_fwd_bytes", "formula", "FlashMLA csrc/api/sparse_fwd.h out, max_logits, lse",
    _sparse_fwd_bytes,
)  # fmt: skip
WIDENED_BYTES = Guard(
    "widened_bytes", "formula", "SGLang 0.5.23 dsa_backend.py:2442 dequantize_k_cache_paged_dsa",
    _widened_bytes,
)  # fmt: skip


# --- all that limits a kernel

DECODE_ROWS = (FLASHMLA_SCHEDULE, FLASHMLA_OFFSETS, FLASHMLA_SCRATCH)
"""Of flash_mla_with_kvcache, whatever it reads."""
_TOPK_64 = multiple_of_topk(
    64, "flash_mla_with_kvcache", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689"
)
DECODE_KERNEL = (FLASHMLA_SHAPE, *DECODE_ROWS, _TOPK_64)
"""Of flash_mla_with_kvcache over V3.2's packed pool."""
DENSE_DECODE = (FLASHMLA_SHAPE, *DECODE_ROWS)
"""Of flash_mla_with_kvcache over all tokens of a bf16 pool."""
MIXED_KERNEL = (FLASHMLA_SHAPE, MIXED_OFFSETS, MIXED_SCRATCH, _TOPK_64)
"""The same with all queries in one row, whose schedule is of one row."""
SPARSE_FWD = (
    FLASHMLA_SHAPE,
    SPARSE_FWD_OFFSETS,
    SPARSE_FWD_BYTES,
    multiple_of_topk(
        128, "flash_mla_sparse_fwd", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:577"
    ),
)
"""Of flash_mla_sparse_fwd over V3.2's latents, besides the memory of what is dequantized first."""
