"""Do something once a module has been imported by whoever needs it, and not import it for that.

Engines load plug-ins in every process. If a plug-in imported what it hooks, as SGLang's hook
registry does, an API server or a detokenizer would load the attention kernels, and with some
releases open the GPU, for nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as the module `name` is loaded: at once if it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module by way of the other finders, and adds an ending to its loader."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, whose loader calls back; None for every other module."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        # Those before this one have had their turn; asking them again could go on for ever.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            # Finders of before Python 3.4 have none, and Python passes over them too.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._done)
                return spec
        return None

    def _done(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class _Loader(Loader):
    """A module's loader that calls back afterwards, and leaves no trace in the module."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What the module's own loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the ending."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
