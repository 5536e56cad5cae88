"""FlashMLA's limits: its schedule kernel by build, int32 offsets, shapes and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.backend.libraries.probed import bound
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Guard, Setting

__all__ = [
    "FLASHMLA_OFFSETS",
    "FLASHMLA_SCHEDULE",
    "FLASHMLA_SCRATCH",
    "FLASHMLA_SHAPE",
    "SCHEDULE_BUILDS",
    "SPARSE_FWD_BYTES",
    "SPARSE_FWD_OFFSETS",
    "WIDENED_BYTES",
    "ScheduleBuild",
    "multiple_of_topk",
    "padded_heads",
    "schedule_build",
    "schedule_rows",
    "schedule_surcharge_us",
    "split_parts",
]

INT32 = 2**31
_SHARE_OF_MEMORY = 4
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
    # SGLang's own replacement (dsv4/flashmla_sched_meta.py) stays under what needs no opt-in.
    ScheduleBuild(
        "sglang", "0.5.", _SM100, 5, "hands over to FlashMLA's", False, 8, 49152
    ),
)  # fmt: skip
"""4 * (2b + 1) until September 2025, 4 * (5b + 1) since, 4 * (3b + 1) in sgl-flash-mla's build for
Hopper; upstream's ends the process, SGLang's goes on with one thread."""


def schedule_build(setting: Setting) -> ScheduleBuild | None:
    """The build that answers for `flash_mla` in `setting`, or None for one nobody has looked at."""
    installed = [one for one in SCHEDULE_BUILDS if one.distribution in setting.libraries]
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
    return bound(setting, "flashmla_schedule_rows", formula)


def _flashmla_schedule(batch: Batch, setting: Setting) -> str | None:
    build, limit = schedule_build(setting), schedule_rows(setting)
    if limit is None:
        return "no known build of flash_mla answers here, so its schedule limit is unknown"
    if batch.q_tokens <= limit or (build is not None and build.survives and limit > 0):
        return None
    past = f", where {build.distribution} {build.past}" if build is not None else ""
    return f"{batch.q_tokens} rows pass FlashMLA's schedule limit of {limit}{past}"


def schedule_surcharge_us(batch: Batch, setting: Setting) -> float:
    """Microseconds that a schedule beyond the cliff of a build that survives it takes more."""
    limit = schedule_rows(setting)
    if limit is None or batch.q_tokens <= limit:
        return 0.0
    per_row = setting.limits.get("flashmla_schedule_ns_per_row", _SLOW_NS_PER_ROW)
    return batch.q_tokens * per_row / 1e3


# --- offsets, memory and shapes


def _flashmla_offsets(batch: Batch, setting: Setting) -> str | None:
    heads = padded_heads(setting.heads)
    if heads is None:
        return f"FlashMLA computes at most 128 heads, {setting.heads} given"
    limit = bound(
        setting, "flashmla_decode_rows", (INT32 - 1) // (heads * 512) - split_parts(setting)
    )
    if limit is not None and batch.q_tokens > limit:
        return (
            f"{batch.q_tokens} rows of {heads} heads pass {limit}, "
            "behind which FlashMLA's int32 split offsets overflow"
        )
    if batch.q_tokens * setting.profile.index_topk >= INT32:
        return f"{batch.q_tokens} rows overflow FlashMLA's int32 index offsets"
    return None


def _flashmla_scratch(batch: Batch, setting: Setting) -> str | None:
    heads = padded_heads(setting.heads) or 128
    needed = (batch.q_tokens + split_parts(setting)) * heads * (512 + 1) * 4
    return _too_much(needed, "scratch memory of FlashMLA's decode kernel", setting)


def _sparse_fwd_offsets(batch: Batch, setting: Setting) -> str | None:
    if padded_heads(setting.heads) is None:
        return f"FlashMLA computes at most 128 heads, {setting.heads} given"
    if batch.q_tokens * setting.profile.index_topk >= INT32:
        return f"{batch.q_tokens} rows overflow flash_mla_sparse_fwd's int32 index offsets"
    return None


def _sparse_fwd_bytes(batch: Batch, setting: Setting) -> str | None:
    heads, profile = padded_heads(setting.heads) or 128, setting.profile
    # q and the output in bf16, two fp32 statistics a head.
    needed = batch.q_tokens * heads * (2 * (profile.latent + profile.rank) + 8)
    return _too_much(needed, "operands of flash_mla_sparse_fwd", setting)


def _widened_bytes(batch: Batch, setting: Setting) -> str | None:
    if setting.layout is not KVLayout.FP8_PACKED or not batch.prefix_tokens:
        return None
    needed = batch.kv_tokens * 2 * setting.profile.latent
    return _too_much(needed, "dequantized latents", setting)


def _too_much(needed: int, what: str, setting: Setting) -> str | None:
    memory = setting.device.memory
    if memory and needed > memory // _SHARE_OF_MEMORY:
        return f"{needed / 2**30:.1f} GiB of {what} pass a quarter of the device's memory"
    return None


def _flashmla_shape(batch: Batch, setting: Setting) -> str | None:
    del batch
    profile = setting.profile
    if (profile.rank, profile.rope) != (512, 64):
        return (
            f"FlashMLA's sparse kernels take latents of 512 + 64 values, {profile.name} has "
            f"{profile.rank} + {profile.rope}"
        )
    return None


def multiple_of_topk(multiple: int, kernel: str, source: str) -> Guard:
    """The guard that `kernel` takes an index_topk that is a multiple of `multiple` only."""

    def check(batch: Batch, setting: Setting) -> str | None:
        del batch
        topk = setting.profile.index_topk
        return f"{kernel} needs topk % {multiple} == 0, got {topk}" if topk % multiple else None

    return Guard(f"topk_multiple_{multiple}", "formula", source, check)


FLASHMLA_SCHEDULE = Guard(
    "flashmla_schedule", "formula",
    "FlashMLA get_decoding_sched_meta.cu:109, 4*(5b+1); sgl-flash-mla 1.0.0 legacy 4*(3b+1)",
    _flashmla_schedule,
)  # fmt: skip
FLASHMLA_OFFSETS = Guard(
    "flashmla_offsets", "formula",
    "FlashMLA csrc/smxx/decode/combine/combine.cu:46 (b + parts) * s_q * h * 512 < 2**31",
    _flashmla_offsets,
)  # fmt: skip
FLASHMLA_SCRATCH = Guard(
    "flashmla_scratch", "formula", "FlashMLA csrc/api/sparse_decode.h o_accum, lse_accum",
    _flashmla_scratch,
)  # fmt: skip
FLASHMLA_SHAPE = Guard(
    "flashmla_shape", "formula", "FlashMLA csrc/api/sparse_decode.h, sparse_fwd.h: d_qk 576",
    _flashmla_shape,
)  # fmt: skip
SPARSE_FWD_OFFSETS = Guard(
    "sparse_fwd_offsets", "formula", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470",
    _sparse_fwd_offsets,
)  # fmt: skip
SPARSE_FWD_BYTES = Guard(
    "sparse_fwd_bytes", "formula", "FlashMLA csrc/api/sparse_fwd.h out, max_logits, lse",
    _sparse_fwd_bytes,
)  # fmt: skip
WIDENED_BYTES = Guard(
    "widened_bytes", "formula", "SGLang 0.5.23 dsa_backend.py:2442 dequantize_k_cache_paged_dsa",
    _widened_bytes,
)  # fmt: skip
