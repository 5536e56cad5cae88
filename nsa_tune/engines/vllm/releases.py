"""What of vLLM the plug-in touches, by release. All else here is the same for every release.

Each symbol, signature and name was read from the wheels of 0.31.0, 0.32.0 and 0.33.0, and the tests
read them again. vLLM moves such code often: a release that is not in the table is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from nsa_tune.engines.symbols import Symbol

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Release:
    """The releases of one minor version."""

    version: Version
    symbols: tuple[Symbol, ...]
    flags: frozenset[str]
    """Launch arguments and fields of `--attention-config` that advice may name."""


_BACKENDS = "vllm.v1.attention.backends.mla"
_BUILDER = ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")

_SYMBOLS = (
    Symbol(
        "flashmla", f"{_BACKENDS}.flashmla_sparse", "FlashMLASparseMetadataBuilder.__init__",
        _BUILDER, True,
    ),
    Symbol(
        "flashmla_build", f"{_BACKENDS}.flashmla_sparse", "FlashMLASparseMetadataBuilder.build",
        _BUILD, True,
    ),
    Symbol(
        "fa3", f"{_BACKENDS}.flashattn_mla_sparse", "FlashAttnMLASparseMetadataBuilder.__init__",
        _BUILDER, True,
    ),
    Symbol(
        "common_build", "vllm.model_executor.layers.attention.sparse_mla_attention",
        "SparseMLACommonMetadataBuilder.build", _BUILD, True,
    ),
    Symbol(
        "capture", "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build_for_cudagraph_capture", ("self", "common_attn_metadata"),
        True,
    ),
)  # fmt: skip
_FLAGS = frozenset(
    {
        "kv_cache_dtype", "tensor_parallel_size", "data_parallel_size", "attention_backend",
        "backend", "sparse_mla_force_mqa", "mla_prefill_backend",
    }
)  # fmt: skip

RELEASES = tuple(Release((0, minor), _SYMBOLS, _FLAGS) for minor in (31, 32, 33))


def release_of(version: str) -> Release | None:
    """The release that `version` (as `vllm.__version__` has it) belongs to, if it is known."""
    match = re.match(r"(\d+)\.(\d+)\.", version)
    if match is None:
        return None
    number = (int(match[1]), int(match[2]))
    return next((release for release in RELEASES if release.version == number), None)


def installed_version() -> str | None:
    """The version of vLLM in this environment."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def checked() -> str:
    """The known versions, in words; there are no gaps between them."""
    first, last = (".".join(map(str, end.version)) for end in (RELEASES[0], RELEASES[-1]))
    return f"{first} to {last}"
