"""DeepGEMM's limits: metadata rows by build, queries a row, shapes and the bytes of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from nsa_tune.backend.libraries.limits import at_most, at_most_rows, bound, quarter_of_memory
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting

ARCHS = frozenset({"sm90", "sm100"})
"""Architectures that its metadata and paged logits exist for."""
_TILE_BYTES = 1024
"""A row of logits is padded to whole tiles of 256 fp32 values."""


@dataclass(frozen=True, slots=True)
class _MetadataBuild:
    """DeepGEMM's metadata kernel in a range of builds; rows are rounded up to 32 on SM90."""

    since: tuple[int, ...]
    """The first version of sgl-deep-gemm in the range."""
    sm90: int
    """Bytes of shared memory a row on SM90."""
    sm90_fixed: int = 0
    sm100: int = 8


# Newest first. Upstream's own numbers say nothing about its commits, so a source build has none.
_METADATA_BUILDS = (
    _MetadataBuild((0, 1, 4), sm90=4),
    # Static 4 and dynamic 3 ints a row, of which only the latter are checked before the launch.
    _MetadataBuild((0, 1, 0), sm90=16, sm90_fixed=4, sm100=16),
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
    version = _version(setting.libraries.get("sgl-deep-gemm", ""))
    build = next((build for build in _METADATA_BUILDS if version >= build.since), None)
    if build is not None and device.arch == "sm90":
        formula = (device.shared_memory_optin - build.sm90_fixed) // build.sm90 // 32 * 32
    elif build is not None and device.arch in ("sm100", "sm103"):
        formula = device.shared_memory_optin // build.sm100
    return bound(setting, "deep_gemm_metadata_rows", formula, device.shared_memory_optin // 4)


def _metadata(setting: Setting) -> Limit | str:
    most = metadata_rows(setting)
    if most is None:
        return "no known build of deep_gemm answers here, so its limit of metadata rows is unknown"
    return at_most_rows(most, f"pass the {most} that DeepGEMM's metadata kernel has room for")


def _next_n(setting: Setting) -> Limit | None:
    formula = 2 if setting.device.arch == "sm90" else None
    known = (formula, setting.limits.get("deep_gemm_next_n"))
    most = min((limit for limit in known if limit is not None), default=None)
    if most is None:
        return None
    words = "1 or 2" if most == 2 else f"up to {most}"
    why = f"DeepGEMM takes next_n {words} on {setting.device.arch.upper()}"
    return at_most(most, attrgetter("next_n"), lambda next_n: f"{why}, {next_n} given")


def paged_logits_bytes(batch: Batch) -> int:
    """Bytes of paged logits: each row is as wide as the longest sequence."""
    return batch.q_tokens * ((batch.max_kv + 255) // 256) * _TILE_BYTES


def ragged_logits_bytes(batch: Batch) -> int:
    """Bytes of ragged logits: each row is as wide as all keys together, and 256 more."""
    return batch.q_tokens * ((batch.kv_tokens + 511) // 256) * _TILE_BYTES


def _mqa_shape(setting: Setting) -> str | None:
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
NEXT_N_SM90 = Guard("next_n_sm90", "formula", "DeepGEMM sm90_fp8_mqa_logits.hpp:363", _next_n)
MQA_LOGITS_BYTES = Guard(
    "mqa_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:245",
    lambda setting: quarter_of_memory(paged_logits_bytes, "logits", setting),
)  # fmt: skip
RAGGED_LOGITS_BYTES = Guard(
    "ragged_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:80",
    lambda setting: quarter_of_memory(ragged_logits_bytes, "logits", setting),
)  # fmt: skip
MQA_SHAPE = Guard(
    "mqa_shape", "formula", "DeepGEMM csrc/apis/attention.hpp:198-403 host asserts", _mqa_shape
)
