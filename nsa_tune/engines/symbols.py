"""The engine's methods that are hooked: are they as expected, and do they have their hooks?"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name

_PACKAGE = __name__.rpartition(".")[0]
"""Where the hooks of every engine are."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A method or function of the engine that is hooked."""

    name: str
    """What the plug-in calls it."""
    module: str
    path: str
    """Class and method, or function, within the module."""
    arguments: tuple[str, ...]
    """Its first arguments, which the hook relies upon."""
    exact: bool
    """Whether it may have no others."""

    @property
    def target(self) -> str:
        """The dotted path."""
        return f"{self.module}.{self.path}"

    def accepts(self, arguments: tuple[str, ...]) -> bool:
        """Whether a method with these arguments is the one that the hook was written for."""
        given = arguments if self.exact else arguments[: len(self.arguments)]
        return given == self.arguments


def changed(symbols: tuple[Symbol, ...], *changes: Symbol) -> tuple[Symbol, ...]:
    """`symbols`, with `changes` in place of those of the same names."""
    by_name = {symbol.name: symbol for symbol in changes}
    return tuple(by_name.get(symbol.name, symbol) for symbol in symbols)


def mismatch(symbol: Symbol) -> str | None:
    """What is wrong with the imported `symbol`, or None when it is as expected."""
    try:
        method = resolve_name(symbol.target)
    except (AttributeError, ImportError, ValueError) as error:
        return f"{symbol.target} is not there: {error}"
    arguments = tuple(inspect.signature(method).parameters)
    if symbol.accepts(arguments):
        return None
    return f"{symbol.target} takes ({', '.join(arguments)})"


def hooks_on(method: object) -> int:
    """How many of the plug-in's hooks run when `method` is called.

    A replacement by another plug-in names what it replaces as wrapped, but does not call it.
    """
    count = 0
    while method is not None:
        held = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        inner = getattr(method, "__wrapped__", None)
        if not any(content is inner for content in held):
            break
        count += any(_is_hook(content) for content in held if content is not inner)
        method = inner
    return count


def _is_hook(content: object) -> bool:
    # A wrapped method bears the module of the engine's own.
    return str(getattr(content, "__module__", None)).startswith(f"{_PACKAGE}.")


def in_source(distribution: str, symbol: Symbol) -> tuple[bool, str]:
    """Whether the installed source has `symbol` as the hook takes it, and what it has, in words;
    nothing of it is imported."""
    path = _file_of(distribution, symbol.module)
    if path is None:
        return False, f"{distribution} has no module {symbol.module}"
    method = _defined(ast.parse(path.read_text(encoding="utf-8")), symbol.path.split("."))
    if isinstance(method, ast.FunctionDef):
        arguments = tuple(arg.arg for arg in _arguments(method.args))
        return symbol.accepts(arguments), f"{symbol.path}({', '.join(arguments)})"
    return False, f"{symbol.module} has no {symbol.path}"


def _defined(tree: ast.Module, path: Sequence[str]) -> ast.AST | None:
    """The class, method or function called `path` at the top of a module."""
    scope: ast.AST = tree
    for name in path:
        inside = [
            node
            for node in getattr(scope, "body", ())
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if not inside:
            return None
        scope = inside[-1]
    return scope


def _arguments(given: ast.arguments) -> Iterator[ast.arg]:
    yield from given.args
    if given.vararg is not None:
        yield given.vararg
    yield from given.kwonlyargs
    if given.kwarg is not None:
        yield given.kwarg


def _file_of(distribution: str, module: str) -> Path | None:
    inside = Path(*module.split(".")).with_suffix(".py")
    for file in metadata.files(distribution) or ():
        if Path(file) == inside:
            return Path(str(file.locate()))
    # An editable installation lists none of its files.
    for folder in sys.path:
        if (Path(folder) / inside).is_file():
            return Path(folder) / inside
    return None
