"""Stand-in for 44 MB that make output follow a grammar; a run has `grammar_backend="none"`.

Whatever is imported from here, from submodules too, is an empty class: SGLang inherits from some
and names others in pydantic models when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_classes: dict[str, type] = {}


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    if name not in _classes:
        members = {"__init__": _nothing, "__get_pydantic_core_schema__": classmethod(_any_schema)}
        _classes[name] = type(name, (), members)
    return _classes[name]


def _nothing(self: object, *_: object, **__: object) -> None: ...


def _any_schema(cls: type, source: object, handler: object) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Finder(MetaPathFinder):
    """Finds every submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return ModuleSpec(fullname, _Loader(), is_package=True)
        return None


class _Loader(Loader):
    """Makes a module that has every name."""

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = __getattr__


sys.meta_path.insert(0, _Finder())
