"""advise: lines that a shell reads, weighted by a decision log, for known releases."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.shell import GPU, Shell


def test_advise_prints_lines_that_a_shell_reads(shell: Shell, database: Path) -> None:
    answer = shell("advise", *GPU, "--heads", "128", "--db", str(database))

    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines
    assert all(line.startswith(("#", "export ", "NSA_TUNE_SGLANG_ARGS=")) for line in lines)
    done = subprocess.run(["sh", "-n"], input=answer.out, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_advise_weights_the_batches_of_a_decision_log(
    shell: Shell, database: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    command = ("advise", *GPU, "--db", str(database), "--json")
    unweighted = json.loads(shell(*command).out)
    assert unweighted["weights"] == "each measured batch counts the same"
    key = {name: unweighted[name] for name in ("gpu", "model", "heads", "kv_layout")}
    line = {
        "schema": "nsa-tune/decision/1", "time": 1.0, **key, "count": 3,
        "batch": "extend:1920+128", "own": {}, "taken": {},
    }  # fmt: skip
    other = {**line, "heads": 1, "batch": "decode:n1:64"}
    log.write_text(f"{json.dumps(other)}\n{json.dumps(line)}\n")

    weighted = json.loads(shell(*command, "--log", str(log)).out)

    assert weighted["schema"] == "nsa-tune/advise/2"
    assert weighted["weights"] == "weighted by the batches given"
    log.write_text(f"{json.dumps(other)}\n")
    foreign = shell(*command, "--log", str(log))
    assert foreign.code == 2
    assert f"it has {key['gpu']}, {key['model']}, 1, {key['kv_layout']}" in foreign.err
    log.write_text("")
    assert "it has no decisions" in shell(*command, "--log", str(log)).err


def test_advise_knows_which_releases_it_knows(shell: Shell, database: Path) -> None:
    answer = shell("advise", *GPU, "--db", str(database), "--engine-version", "0.4.0")

    assert answer.code == 2
    assert "0.4.0" in answer.err
