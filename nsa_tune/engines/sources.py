"""Whether an engine's installed source has what is hooked; nothing of it is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from nsa_tune.engines.symbols import Symbol


def in_source(distribution: str, symbol: Symbol) -> tuple[bool, str]:
    """Whether `symbol` is there as the hook takes it; and what is there, in words."""
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
