"""DeepGEMM's limits: metadata rows by build, queries a row, shapes and the bytes of its logits."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.backend.libraries.probed import bound
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Setting

__all__ = [
    "METADATA_ROWS",
    "MQA_LOGITS_BYTES",
    "MQA_SHAPE",
    "NEXT_N_SM90",
    "metadata_rows",
]


@dataclass(frozen=True, slots=True)
class _MetadataBuild:
    """DeepGEMM's metadata kernel in a range of builds; rows are rounded up to 32 on SM90."""

    distribution: str
    since: tuple[int, ...]
    """The first version of the range."""
    sm90: int
    """Bytes of shared memory a row on SM90."""
    sm90_fixed: int = 0
    sm100: int = 8


# Newest first. Upstream's own numbers say nothing about its commits, so a source build has none.
_METADATA_BUILDS = (
    _MetadataBuild("sgl-deep-gemm", (0, 1, 4), sm90=4),
    # Static 4 and dynamic 3 ints a row, of which only the latter are checked before the launch.
    _MetadataBuild("sgl-deep-gemm", (0, 1, 0), sm90=16, sm90_fixed=4, sm100=16),
)


def _version(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def metadata_rows(setting: Setting) -> int | None:
    """Most rows that DeepGEMM schedules, by formula and probe; None where neither is known."""
    formula, device = None, setting.device
    for build in _METADATA_BUILDS:
        version = _version(setting.libraries.get(build.distribution, ""))
        if version and version >= build.since:
            memory = device.shared_memory_optin - build.sm90_fixed
            if device.arch == "sm90":
                formula = memory // build.sm90 // 32 * 32
            elif device.arch in ("sm100", "sm103"):
                formula = device.shared_memory_optin // build.sm100
            break
    return bound(setting, "deep_gemm_metadata_rows", formula)


def _metadata(batch: Batch, setting: Setting) -> str | None:
    limit = metadata_rows(setting)
    if limit is None:
        return "no known build of deep_gemm answers here, so its limit of metadata rows is unknown"
    if batch.q_tokens > limit:
        return (
            f"{batch.q_tokens} rows pass the {limit} that DeepGEMM's metadata kernel has room for"
        )
    return None  # fmt: skip


def _next_n_sm90(batch: Batch, setting: Setting) -> str | None:
    limit = bound(setting, "deep_gemm_next_n", 2 if setting.device.arch == "sm90" else None)
    if limit is not None and batch.next_n > limit:
        where = setting.device.arch.upper()
        words = "1 or 2" if limit == 2 else f"up to {limit}"
        return f"DeepGEMM takes next_n {words} on {where}, {batch.next_n} given"
    return None


def _mqa_logits_bytes(batch: Batch, setting: Setting) -> str | None:
    # DeepGEMM pads a row of fp32 logits to 256 values.
    row = (batch.max_kv + 255) // 256 * 1024
    needed = batch.q_tokens * row
    if setting.device.memory and needed > setting.device.memory // 4:
        return f"{needed / 2**30:.1f} GiB of logits pass a quarter of the device's memory"
    return None


def _mqa_shape(batch: Batch, setting: Setting) -> str | None:
    del batch
    profile = setting.profile
    heads = {32, 64} if setting.device.arch == "sm90" else {8, 16, 32, 64}
    pages = {64} if setting.device.arch == "sm90" else {32, 64}
    if (
        profile.index_heads in heads
        and profile.index_dim in (32, 64, 128)
        and profile.page_size in pages
    ):
        return None
    return (
        f"DeepGEMM's paged logits do not take {profile.index_heads} index heads of "
        f"{profile.index_dim} values with pages of {profile.page_size} on {setting.device.arch}"
    )


METADATA_ROWS = Guard(
    "deep_gemm_metadata_rows", "formula",
    "DeepGEMM csrc/jit_kernels/impls/sm90_fp8_mqa_logits.hpp:199 (4a bytes, before 88965b0 16a+4)",
    _metadata,
)  # fmt: skip
NEXT_N_SM90 = Guard("next_n_sm90", "formula", "DeepGEMM sm90_fp8_mqa_logits.hpp:363", _next_n_sm90)
MQA_LOGITS_BYTES = Guard(
    "mqa_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:245", _mqa_logits_bytes
)
MQA_SHAPE = Guard(
    "mqa_shape", "formula", "DeepGEMM csrc/apis/attention.hpp:198-403 host asserts", _mqa_shape
)
