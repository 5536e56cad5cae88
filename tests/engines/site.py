"""A directory that looks like an environment with an engine and nsa-tune in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_LOOK = """
import json, os
from nsa_tune.backend.hardware import detect
detect.local_device_name = lambda: os.environ.get("GPU", "No GPU")
from nsa_tune.autotune.health.doctor import State, examine_engine
findings = examine_engine("{engine}").findings
print(json.dumps({{one.subject: [one.state is State.OK, one.text] for one in findings}}))
"""


class EngineSite:
    """The directory, and programs run with it."""

    def __init__(self, folder: Path, *, engine: str, version: str, group: str) -> None:
        self.folder = folder
        self._engine = engine
        self._group = group
        points: dict[str, str] = _PROJECT["entry-points"][group]
        entry = "\n".join([f"[{group}]", *(f"{name} = {at}" for name, at in points.items()), ""])
        self._distribution(engine, version, "")
        self._distribution("nsa-tune", "0.1.0", entry)

    def write(self, name: str, text: str) -> None:
        """Write one file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def packages(self, top: str) -> None:
        """Make a package of every folder under `top` that has a module."""
        for inside in {path.parent for path in (self.folder / top).rglob("*.py")}:
            for package in (inside, *inside.parents):
                if package.is_relative_to(self.folder / top):
                    (package / "__init__.py").touch()

    def plugin(self, name: str, code: str) -> None:
        """Add a plug-in of somebody else's, whose entry point runs `code`."""
        self.write(f"{name}.py", f"def register():\n{indent(code.strip(), '    ')}\n")
        self._distribution(name, "1.0", f"[{self._group}]\n{name} = {name}:register\n")

    def without_entry_point(self) -> None:
        """As if nsa-tune were not installed."""
        (self.folder / "nsa_tune-0.1.0.dist-info/entry_points.txt").write_text("")

    def _distribution(self, name: str, version: str, entry_points: str) -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"{folder}/METADATA", metadata)
        self.write(f"{folder}/entry_points.txt", entry_points)

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of a program that finds this site first, then the repository."""
        paths = os.pathsep.join((str(self.folder), str(REPOSITORY)))
        # Nothing that is remembered of the machine's own engines.
        data = {"XDG_DATA_HOME": str(self.folder / "data")}
        return {**os.environ, **data, "PYTHONPATH": paths, **variables}

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in a process of its own."""
        return subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )

    def printed(self, code: str, **variables: str) -> tuple[Any, str]:
        """What `code` prints last, a line of JSON, and what it logs."""
        done = self.run(code, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    def health(self, before: str = "", **variables: str) -> dict[str, tuple[bool, str]]:
        """The doctor's view of the plug-in: by name, whether it is well, and what is said of it.

        The code `before` runs first.
        """
        found, _ = self.printed(before + _LOOK.format(engine=self._engine), **variables)
        return {name: (ok, detail) for name, (ok, detail) in found.items()}


def wrong(found: dict[str, tuple[bool, str]]) -> set[str]:
    """The names of what is not well."""
    return {name for name, (ok, _) in found.items() if not ok}
