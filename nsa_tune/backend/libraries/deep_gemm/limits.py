"""DeepGEMM's limits: metadata rows by build, queries a row, shapes and the bytes of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from nsa_tune.backend.libraries.limits import bound, quarter_of_memory
from nsa_tune.backend.types.formula import Limit
from nsa_tune.backend.types.point import Guard, Setting

ARCHS = frozenset({"sm90", "sm100"})
"""Architectures that its metadata and paged logits exist for."""
_TILE_BYTES = 1024
"""A row of logits is padded to whole tiles of 256 fp32 values."""
_RAGGED_TILES = "((kv_tokens + 511) // 256)"
"""Tiles of a row of ragged logits: as wide as all keys together, and 256 more."""


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
    return bound(setting, "deep_gemm_metadata_rows", formula, device.shared_memory_optin // 4)


def _metadata(setting: Setting) -> tuple[Limit, ...]:
    limit = metadata_rows(setting)
    if limit is None:
        why = "no known build of deep_gemm answers here, so its limit of metadata rows is unknown"
        return (Limit("True", why),)
    why = f"{{q_tokens}} rows pass the {limit} that DeepGEMM's metadata kernel has room for"
    return (Limit(f"q_tokens > {limit}", why),)


def _next_n(setting: Setting) -> tuple[Limit, ...]:
    limits = [
        *([2] if setting.device.arch == "sm90" else []),
        *(value for name, value in setting.limits.items() if name == "deep_gemm_next_n"),
    ]
    if not limits:
        return ()
    limit = min(limits)
    words = "1 or 2" if limit == 2 else f"up to {limit}"
    where = setting.device.arch.upper()
    why = f"DeepGEMM takes next_n {words} on {where}, {{next_n}} given"
    return (Limit(f"next_n > {limit}", why),)


def _logits(tiles: str, setting: Setting) -> tuple[Limit, ...]:
    """The limit of rows of so many `tiles` of 256 fp32 logits."""
    most = setting.device.memory // 4 // _TILE_BYTES
    # Nearly every batch is far below, which a product of floats tells in a quarter of the time:
    # rows * (keys + 511) / 256 <= most where rows <= keys and rows * keys <= small**2.
    small = max((isqrt(511**2 + 4 * 256 * most) - 511) // 2, 0)
    passed = f"rows * keys > {small**2}.0 and q_tokens * {tiles} > {most}"
    return quarter_of_memory(f"q_tokens * {tiles} * {_TILE_BYTES}", "logits", setting, passed)


def _mqa_logits_bytes(setting: Setting) -> tuple[Limit, ...]:
    return _logits("((max_kv + 255) // 256)", setting)


def _ragged_logits_bytes(setting: Setting) -> tuple[Limit, ...]:
    return _logits(_RAGGED_TILES, setting)


def ragged_logits_bytes() -> str:
    """The formula of the bytes of ragged logits."""
    return f"q_tokens * ({_RAGGED_TILES} * {_TILE_BYTES})"


def _mqa_shape(setting: Setting) -> tuple[Limit, ...]:
    profile = setting.profile
    heads = {32, 64} if setting.device.arch == "sm90" else {8, 16, 32, 64}
    pages = {64} if setting.device.arch == "sm90" else {32, 64}
    if (
        profile.index_heads in heads
        and profile.index_dim in (32, 64, 128)
        and profile.page_size in pages
    ):
        return ()
    why = (
        f"DeepGEMM's paged logits do not take {profile.index_heads} index heads of "
        f"{profile.index_dim} values with pages of {profile.page_size} on {setting.device.arch}"
    )
    return (Limit("True", why),)


METADATA_ROWS = Guard(
    "deep_gemm_metadata_rows", "formula",
    "DeepGEMM csrc/jit_kernels/impls/sm90_fp8_mqa_logits.hpp:199 (4a bytes, before 88965b0 16a+4)",
    _metadata,
)  # fmt: skip
NEXT_N_SM90 = Guard("next_n_sm90", "formula", "DeepGEMM sm90_fp8_mqa_logits.hpp:363", _next_n)
MQA_LOGITS_BYTES = Guard(
    "mqa_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:245", _mqa_logits_bytes
)
RAGGED_LOGITS_BYTES = Guard(
    "ragged_logits_bytes", "formula", "DeepGEMM csrc/apis/attention.hpp:80", _ragged_logits_bytes
)
MQA_SHAPE = Guard(
    "mqa_shape", "formula", "DeepGEMM csrc/apis/attention.hpp:198-403 host asserts", _mqa_shape
)
