"""Stand-ins for packages that vLLM imports and a run never uses.

Python imports this by itself when it starts, in every process: vLLM looks at its models in another.
A package that is installed is left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = frozenset({
    "PIL", "aiohttp", "anthropic", "cv2", "llguidance", "lmformatenforcer", "mcp", "mistral_common",
    "model_hosting_container_standards", "openai_harmony", "opentelemetry", "outlines_core",
    "prometheus_fastapi_instrumentator", "uvloop", "xgrammar",
})  # fmt: skip
ABSENT = ("opentelemetry.exporter", "opentelemetry.sdk")
"""vLLM traces its calls where it finds these; FastAPI needs the rest of the package."""


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Names):
    """Can be called, inherited from, decorated with, and used as a field's type."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any, **__: Any) -> Any:
        return importlib.import_module("pydantic_core").core_schema.any_schema()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages `missing`, with any module in them."""

    def __init__(self, missing: frozenset[str]) -> None:
        self._missing = missing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module of ours; None for what is not missing or has to stay so."""
        if fullname.partition(".")[0] not in self._missing or fullname.startswith(ABSENT):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module in which any name is a class."""
        module = types.ModuleType(spec.name)

        def named(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            made = _Names(name, (Anything,), {})
            setattr(module, name, made)
            return made

        vars(module).update(__path__=[], __version__="99.0", __getattr__=named)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(
    Finder(frozenset(name for name in NAMES if importlib.util.find_spec(name) is None))
)
