"""Which installed package provides each kernel library. Looking for one does not import it."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

from nsa_tune._errors import LibraryMissing

__all__ = ["PROVIDERS", "Answering", "Library", "answering", "load", "missing"]


@dataclass(frozen=True, slots=True)
class Library:
    """A kernel library and the distributions that may bring it, the first installed wins."""

    name: str
    sources: tuple[tuple[str, str], ...]
    """(distribution, module that it brings)."""
    install: str
    """The command that installs the usual one."""
    optional: bool = False
    """Part of an engine: where it is not installed, its arms are left out and others measured."""


@dataclass(frozen=True, slots=True)
class Answering:
    """The distribution that answers for a library here."""

    distribution: str
    version: str
    module: str


def _of_sglang(name: str, module: str, since: str) -> Library:
    """A part of SGLang, since this version."""
    source = ("sglang", f"sglang.kernels.ops.attention.{module}")
    return Library(name, (source,), f"pip install 'sglang>={since}'", optional=True)


PROVIDERS: dict[str, Library] = {
    library.name: library
    for library in (
        Library(
            "flash_mla",
            (
                ("sgl-flash-mla", "flash_mla"),
                ("sglang-kernel", "sgl_kernel.flash_mla"),
                ("sgl-kernel", "sgl_kernel.flash_mla"),
                ("flash-mla", "flash_mla"),
                ("vllm", "vllm.third_party.flashmla.flash_mla_interface"),
            ),
            "pip install sgl-flash-mla",
        ),
        Library(
            "deep_gemm",
            (
                ("sgl-deep-gemm", "deep_gemm"),
                ("deep-gemm", "deep_gemm"),
                ("vllm", "vllm.third_party.deep_gemm"),
            ),
            "pip install sgl-deep-gemm",
        ),
        Library(
            "sglang_kernel",
            (("sglang-kernel", "sgl_kernel"), ("sgl-kernel", "sgl_kernel")),
            "pip install sglang-kernel",
        ),
        Library(
            "flashinfer", (("flashinfer-python", "flashinfer"),), "pip install flashinfer-python"
        ),
        _of_sglang("sglang_q8", "sparse_mla_q8kv8_prefill_sm90", "0.5.17"),
        _of_sglang("sglang_topk_v2", "dsv4.topk", "0.5.19"),
        _of_sglang("sglang_triton", "dsa.triton_sparse_mla_prefill", "0.5.22"),
        _of_sglang("sglang_triton_decode", "decode_attention", "0.5.17"),
    )
}


def answering(name: str) -> Answering | None:
    """Who answers for the library `name`, or None; reads package metadata only."""
    for distribution, module in PROVIDERS[name].sources:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            if _present(module):
                return Answering(distribution, version, module)
    return None


def missing() -> frozenset[str]:
    """The optional libraries that are not installed."""
    return frozenset(
        name for name, library in PROVIDERS.items() if library.optional and answering(name) is None
    )


def _present(module: str) -> bool:
    """Whether `module` is installed, found without importing its parents as find_spec would."""
    top, *rest = module.split(".")
    spec = util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    *inner, last = rest
    for location in spec.submodule_search_locations or ():
        folder = Path(location, *inner)
        if (folder / last).is_dir() or any(folder.glob(f"{last}.*")):
            return True
    return False


def load(name: str) -> ModuleType:
    """The module of the library `name`, imported.

    Raises:
        LibraryMissing: when no distribution brings it.
        ImportError: when it is installed and does not load.
    """
    found = answering(name)
    if found is None:
        library = PROVIDERS[name]
        raise LibraryMissing(f"{name} is not installed: {library.install}")
    return importlib.import_module(found.module)
