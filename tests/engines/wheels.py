"""Engines' wheels: read as text, and their functions compiled one by one."""

from __future__ import annotations
import __future__

import ast
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[2] / ".cache"
"""Where wheels are kept between runs."""


class Unreachable(Exception):
    """The package index did not give the wheel; the text is pip's."""


class Wheel:
    """One wheel, or the sources of one. Nothing of it is imported whole."""

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self.path = path
        self._zip = zipfile.ZipFile(path)

    @property
    def number(self) -> tuple[int, ...]:
        """The version as three numbers, which can be compared."""
        return tuple(map(int, re.findall(r"\d+", self.version)[:3]))

    def names(self, prefix: str = "") -> list[str]:
        """The files under `prefix`."""
        return [name for name in self._zip.namelist() if name.startswith(prefix)]

    @cache  # noqa: B019 - as long-lived as the wheel, which is cached
    def text(self, name: str) -> str:
        """The text of one file."""
        return self._zip.read(name).decode()

    @cache  # noqa: B019
    def tree(self, name: str) -> ast.Module:
        """The syntax tree of one file."""
        return ast.parse(self.text(name))

    def definition(self, file: str, path: str) -> ast.FunctionDef | ast.ClassDef:
        """The function, class or method called `path` at the top of `file`.

        Raises:
            LookupError: when there is none.
        """
        node: ast.AST | None = self.tree(file) if self.names(file) else None
        for name in path.split("."):
            inner = (
                child
                for child in getattr(node, "body", ())
                if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == name
            )
            node = next(inner, None)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            raise LookupError(f"{self.version} has no {path} in {file}")
        return node

    def has(self, file: str, path: str) -> bool:
        """Whether there is such a definition."""
        try:
            self.definition(file, path)
        except LookupError:
            return False
        return True

    def compiled(self, file: str, path: str, names: dict[str, Any]) -> Any:
        """That definition, made to run with `names` as its globals."""
        module = ast.Module([self.definition(file, path)], [])
        flags = __future__.annotations.compiler_flag
        code = compile(module, f"{self.version}/{file}", "exec", flags, dont_inherit=True)
        space = {"__name__": "wheel", **names}
        exec(code, space)
        return space[path.rpartition(".")[2]]


def complaint(stderr: str) -> str:
    """What pip complained about."""
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return "; ".join(lines) or stderr.strip() or "pip wrote nothing"
