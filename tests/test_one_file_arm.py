"""An arm that is written into one file is swept, stored, decided by, reported and explained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nsa_tune
from nsa_tune.db.reader import read_database

DECODE = Path("nsa_tune", "backend", "points", "decode", "__init__.py")
MADE_UP = '    Arm("made_up", mla.build_torch_kv, _PACKED, reference=True),\n'
BATCH = "decode:n1:700,90,90"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which one line of one file is new."""
    root = tmp_path_factory.mktemp("copy")
    source = Path(nsa_tune.__file__).parent
    shutil.copytree(
        source, root / "nsa_tune", ignore=shutil.ignore_patterns("__pycache__", "*.tsv")
    )
    text = (root / DECODE).read_text(encoding="utf-8")
    before, mark, after = text.partition('    Arm("torch_kv"')
    assert mark
    (root / DECODE).write_text(before + MADE_UP + mark + after, encoding="utf-8")
    return root


def shell(copy: Path, *arguments: str) -> str:
    """What one command of the copy prints."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "NSA_TUNE_DB": str(copy / "t.db")}
    command = [sys.executable, "-m", "nsa_tune.cli", *arguments]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_made_up_arm_appears_everywhere(copy: Path) -> None:
    ran = json.loads(
        shell(
            copy, "run", "--device", "cpu", "--points", "decode", "--budget", "20", "-q", "--json"
        )
    )
    assert ran["measured"] > 0
    assert ran["failures"] == []

    (table,) = read_database(copy / "t.db")
    swept = {row.arm for row in table.measurements}
    assert swept == {"made_up", "torch_kv", "torch_sparse"}
    assert "made_up" in shell(copy, "report", "--format", "json")
    explained = json.loads(shell(copy, "explain", BATCH, "--json"))
    assert "made_up" in explained["reasons"]["decode"]["estimates_us"]
    looked_up = json.loads(shell(copy, "lookup", BATCH, "--json"))
    assert looked_up["plan"]["decode"] in swept
