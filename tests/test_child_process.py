"""What a child process imports: this package, and nothing that lies in the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nsa_tune
from nsa_tune._child_process import environment

if TYPE_CHECKING:
    import pytest


def test_the_working_directory_is_not_on_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute"])

    paths = environment()["PYTHONPATH"].split(os.pathsep)

    root = str(Path(nsa_tune.__file__).parents[1])
    assert paths == [root, str(tmp_path / "relative"), "/absolute"]
