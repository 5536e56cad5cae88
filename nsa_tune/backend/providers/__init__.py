"""Who answers for each kernel library. Asking whether one is there imports nothing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata, util
from types import ModuleType

from nsa_tune._errors import LibraryMissing

__all__ = ["PROVIDERS", "Answering", "Library", "answering", "load"]


@dataclass(frozen=True, slots=True)
class Library:
    """A kernel library and the distributions that may bring it, the first installed wins."""

    name: str
    sources: tuple[tuple[str, str], ...]
    """(distribution, module that it brings)."""
    install: str
    """The command that installs the usual one."""


@dataclass(frozen=True, slots=True)
class Answering:
    """The distribution that answers for a library here."""

    library: str
    distribution: str
    version: str
    module: str


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
            ),
            "pip install sgl-flash-mla",
        ),
        Library(
            "deep_gemm",
            (("sgl-deep-gemm", "deep_gemm"), ("deep-gemm", "deep_gemm")),
            "pip install sgl-deep-gemm",
        ),
        Library(
            "flashinfer", (("flashinfer-python", "flashinfer"),), "pip install flashinfer-python"
        ),
    )
}


def answering(name: str) -> Answering | None:
    """Who answers for the library `name`, or None; reads package metadata only."""
    for distribution, module in PROVIDERS[name].sources:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        # find_spec of a submodule would import its parent: the top package is enough.
        if util.find_spec(module.partition(".")[0]) is not None:
            return Answering(name, distribution, version, module)
    return None


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
