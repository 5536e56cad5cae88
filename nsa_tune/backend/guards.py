"""Hard limits of the kernels, each with its source. A table never overrides one of these.

Formulas take the device's own attributes and the version of the library that answers; a limit
that cannot be evaluated (an unknown build, an unknown device) forbids the arm.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.backend.batch import Batch
from nsa_tune.backend.point import Guard, Setting

__all__ = [
    "CHUNK_CAPACITY",
    "DENSE_EXACT",
    "FA3_WORKS",
    "FLASHMLA_OFFSETS",
    "FLASHMLA_SCHEDULE",
    "INT32",
    "MQA_LOGITS_BYTES",
    "NEXT_N_SM90",
    "NOT_CAPTURED",
    "SPARSE_FWD_OFFSETS",
    "multiple_of_topk",
    "padded_heads",
]

INT32 = 2**31


def padded_heads(heads: int) -> int | None:
    """Heads that FlashMLA computes for `heads` local ones: 64 or 128; None above 128."""
    return 64 if heads <= 64 else 128 if heads <= 128 else None


def _dense_exact(batch: Batch, setting: Setting) -> str | None:
    topk = setting.profile.index_topk
    if batch.max_kv > topk:
        return f"dense attention equals sparse only up to {topk} kv tokens, {batch.max_kv} given"
    return None


def _chunk_capacity(batch: Batch, setting: Setting) -> str | None:
    if batch.kv_tokens > setting.max_chunk_kv:
        return f"{batch.kv_tokens} kv tokens pass the chunk capacity of {setting.max_chunk_kv}"
    return None


def _not_captured(batch: Batch, setting: Setting) -> str | None:
    del setting
    return "dense MHA plans on the host, which a CUDA graph cannot hold" if batch.captured else None


@dataclass(frozen=True, slots=True)
class _ScheduleBuild:
    """FlashMLA's schedule kernel in one build: 4 * (a * rows + 1) bytes of shared memory."""

    distribution: str
    version: str
    """What the version begins with; another one is a build that nobody has looked at."""
    archs: frozenset[str]
    a: int
    past: str
    """What happens past the limit."""


_SM90, _SM100 = frozenset({"sm90"}), frozenset({"sm100", "sm103"})
_BOTH = _SM90 | _SM100

# First that is installed wins, which is also the order in which `flash_mla` is resolved.
_SCHEDULE_BUILDS = (
    _ScheduleBuild("sgl-flash-mla", "1.", _SM90, 3, "falls back to one thread, 8x slower"),
    _ScheduleBuild("sgl-flash-mla", "1.", _SM100, 4, "raises"),
    _ScheduleBuild("sglang-kernel", "0.4.", _BOTH, 5, "falls back to one thread"),
    _ScheduleBuild("sgl-kernel", "0.", _BOTH, 5, "falls back to one thread"),
    _ScheduleBuild("flash-mla", "1.", _BOTH, 5, "ends the process"),
)


def _flashmla_schedule(batch: Batch, setting: Setting) -> str | None:
    installed = [one for one in _SCHEDULE_BUILDS if one.distribution in setting.libraries]
    first = installed[0].distribution if installed else ""
    for build in installed:
        if (
            build.distribution == first
            and setting.libraries[first].startswith(build.version)
            and setting.device.arch in build.archs
        ):
            break
    else:
        return "no known build of flash_mla answers here, so its schedule limit is unknown"
    optin = setting.device.shared_memory_optin
    limit = (optin // 4 - 1) // build.a
    if batch.q_tokens > limit:
        return (
            f"{batch.q_tokens} rows pass FlashMLA's schedule limit of {limit} "
            f"({optin} bytes of shared memory, {build.distribution}), where it {build.past}"
        )
    return None


def _flashmla_offsets(batch: Batch, setting: Setting) -> str | None:
    heads = padded_heads(setting.heads)
    if heads is None:
        return f"FlashMLA computes at most 128 heads, {setting.heads} given"
    parts = max(setting.device.sms // (heads // 64), 1)
    if (batch.q_tokens + parts) * heads * 512 >= INT32:
        return f"{batch.q_tokens} rows of {heads} heads overflow FlashMLA's int32 split offsets"
    return None


def _sparse_fwd_offsets(batch: Batch, setting: Setting) -> str | None:
    if padded_heads(setting.heads) is None:
        return f"FlashMLA computes at most 128 heads, {setting.heads} given"
    if batch.q_tokens * setting.profile.index_topk >= INT32:
        return f"{batch.q_tokens} rows overflow flash_mla_sparse_fwd's int32 index offsets"
    return None


def multiple_of_topk(multiple: int, kernel: str, source: str) -> Guard:
    """The guard that `kernel` takes an index_topk that is a multiple of `multiple` only."""

    def check(batch: Batch, setting: Setting) -> str | None:
        del batch
        topk = setting.profile.index_topk
        return f"{kernel} needs topk % {multiple} == 0, got {topk}" if topk % multiple else None

    return Guard(f"topk_multiple_{multiple}", "formula", source, check)


def _next_n_sm90(batch: Batch, setting: Setting) -> str | None:
    if setting.device.arch == "sm90" and batch.next_n > 2:
        return f"DeepGEMM takes next_n 1 or 2 on SM90, {batch.next_n} given"
    return None


def _fa3_works(batch: Batch, setting: Setting) -> str | None:
    # At most one tile of 128 queries more a sequence than the queries fill.
    tiles = batch.q_tokens // 128 + batch.sequences
    # Above 4096 of them the plan makes one schedule for all heads.
    works = tiles if tiles - 1 > 4096 else tiles * setting.heads
    most = (8 * 2**20 - 4 * (setting.device.sms + 1) - 128) // 28
    if works > most:
        return f"up to {works} work items pass the {most} that FlashInfer's fa3 plan has room for"
    return None


def _mqa_logits_bytes(batch: Batch, setting: Setting) -> str | None:
    # DeepGEMM pads a row of fp32 logits to 256 values.
    row = -(-batch.max_kv // 256) * 256 * 4
    needed = batch.q_tokens * row
    if setting.device.memory and needed > setting.device.memory // 4:
        return f"{needed / 2**30:.1f} GiB of logits pass a quarter of the device's memory"
    return None


DENSE_EXACT = Guard(
    "dense_exact", "semantic", "the indexer selects index_topk tokens of at most as many",
    _dense_exact,
)  # fmt: skip
CHUNK_CAPACITY = Guard(
    "chunk_capacity", "formula", "SGLang 0.5.23 environ.py:724 SGLANG_MAX_KV_CHUNK_CAPACITY",
    _chunk_capacity,
)  # fmt: skip
NOT_CAPTURED = Guard("not_captured", "semantic", "SGLang 0.5.23 dsa_backend.py:4050", _not_captured)
FA3_WORKS = Guard(
    "fa3_works", "formula", "FlashInfer scheduler.cuh:870 PrefillSM90Plan, 8 MiB int workspace",
    _fa3_works,
)  # fmt: skip
FLASHMLA_SCHEDULE = Guard(
    "flashmla_schedule", "formula",
    "FlashMLA get_decoding_sched_meta.cu:109, 4*(5b+1); sgl-flash-mla 1.0.0 legacy 4*(3b+1)",
    _flashmla_schedule,
)  # fmt: skip
FLASHMLA_OFFSETS = Guard(
    "flashmla_offsets", "formula", "FlashMLA csrc/smxx/decode/combine/combine.cu:46",
    _flashmla_offsets,
)  # fmt: skip
SPARSE_FWD_OFFSETS = Guard(
    "sparse_fwd_offsets", "formula", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:470",
    _sparse_fwd_offsets,
)  # fmt: skip
NEXT_N_SM90 = Guard("next_n_sm90", "formula", "DeepGEMM sm90_fp8_mqa_logits.hpp:363", _next_n_sm90)
MQA_LOGITS_BYTES = Guard(
    "mqa_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:245", _mqa_logits_bytes
)
