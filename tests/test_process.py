"""The command line as a process of its own: what it loads, and a reader that leaves early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def _process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nsa_tune", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_the_module_runs_as_a_program(database: Path) -> None:
    done = _process("report", "--heads", "16", "--json", NSA_TUNE_DB=str(database))

    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["sections"][0]["key"]["heads"] == 16


def test_help_and_answers_do_not_load_torch(database: Path) -> None:
    script = (
        "import sys; from nsa_tune import cli\n"
        "try: cli.main(['lookup', 'extend:0+8', '--gpu', 'x'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_traceback(database: Path) -> None:
    command = f"{sys.executable} -m nsa_tune.cli report --json --db {database} | head -c 10"

    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, timeout=120
    )

    assert "Traceback" not in done.stderr


def test_without_rich_and_typer_a_sentence_names_both(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')\n")
    done = _process("doctor", PYTHONPATH=str(tmp_path))

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "nsa-tune: commands need two more packages: pip install rich typer\n"
