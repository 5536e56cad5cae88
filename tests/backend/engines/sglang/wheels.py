"""SGLang's wheels: downloaded once, read as text, and their functions compiled one by one."""

from __future__ import annotations
import __future__

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["VERSIONS", "Unreachable", "Wheel", "wheel_of"]

VERSIONS = ("0.5.15", "0.5.17", "0.5.18", "0.5.23")
"""The first, two between and the last release that the plug-in is for; 0.5.17 is the first that
runs prefills as graphs by default."""

_CACHE = Path(__file__).parents[4] / ".cache" / "sglang"

BACKEND = "sglang/srt/layers/attention/dsa_backend.py"
V4_BACKEND = "sglang/srt/layers/attention/deepseek_v4_backend.py"
MODES = "sglang/srt/model_executor/forward_batch_info.py"


class Unreachable(Exception):
    """The package index did not give the wheel; the text is pip's."""


class Wheel:
    """One wheel. Nothing of it is imported whole."""

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self.path = path
        self._zip = zipfile.ZipFile(path)

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
        """The function, class or method called `path` at the top of `file`."""
        body: list[ast.stmt] = self.tree(file).body
        found: ast.FunctionDef | ast.ClassDef | None = None
        for name in path.split("."):
            found = next(
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
            )
            body = found.body
        assert found is not None
        return found

    def has(self, file: str, path: str) -> bool:
        """Whether there is such a definition."""
        try:
            self.definition(file, path)
        except (KeyError, StopIteration):
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

    def fields(self) -> Iterator[tuple[str, str]]:
        """(field, source) of every launch argument: annotated assignments with a text."""
        files = ["sglang/srt/server_args.py", *self.names("sglang/srt/arg_groups/fields/")]
        for file in files:
            for node in ast.walk(self.tree(file)):
                if isinstance(node, ast.ClassDef):
                    for one in node.body:
                        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                            yield one.target.id, ast.unparse(one.annotation)


@cache
def wheel_of(version: str) -> Wheel:
    """The wheel of one release.

    Raises:
        Unreachable: when it is neither in the cache nor on the index.
    """
    found = sorted(_CACHE.glob(f"sglang-{version}-*.whl"))
    return Wheel(version, found[0] if found else _downloaded(version))


def _downloaded(version: str) -> Path:
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        # The wheel holds sources only, whatever its tag says: take one and the same everywhere.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--python-version=3.11", "--implementation=cp", "--abi=cp311",
            "--platform=manylinux_2_34_x86_64", f"--dest={folder}", f"sglang=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Unreachable("; ".join(lines) or done.stderr.strip() or "pip wrote nothing")
        target = _CACHE / wheels[0].name
        # Another process may have been as quick: both bring the same file.
        wheels[0].replace(target)
    return target
