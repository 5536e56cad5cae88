"""SGLang's wheels, downloaded once."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nsa_tune.engines.sglang.releases import SGLangRelease, release_of
from tests.engines.wheels import CACHE, Unreachable, complaint
from tests.engines.wheels import Wheel as AnyWheel

VERSIONS = ("0.5.17", "0.5.18", "0.5.23")
"""The first two and the last release that the plug-in is for."""

_CACHE = CACHE / "sglang"

BACKEND = "sglang/srt/layers/attention/dsa_backend.py"
MODES = "sglang/srt/model_executor/forward_batch_info.py"


class Wheel(AnyWheel):
    """One of SGLang's wheels."""

    @property
    def release(self) -> SGLangRelease:
        """What the plug-in knows of it."""
        release = release_of(self.version)
        assert release is not None, f"{self.version} is in none of releases.py's RELEASES"
        return release

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
            raise Unreachable(complaint(done.stderr))
        target = _CACHE / wheels[0].name
        # Another process may have been as quick: both bring the same file.
        wheels[0].replace(target)
    return target
