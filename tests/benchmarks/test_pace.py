"""Measurements a second, from the events of two runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import pace


def events(path: Path, seconds: float, batches: int = 6) -> Path:
    """A run whose batches of two arms take `seconds` each, the first one a second more."""
    lines = [{"event": "start"}, {"event": "node", "node": "a", "devices": 1, "batches": 0}]
    lines += [
        {"event": "batch", "seconds": 1 + seconds * (done + 1), "rows": [{}, {}]}
        for done in range(batches)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_first_batches_can_be_left_out(tmp_path: Path) -> None:
    one, other = events(tmp_path / "one.jsonl", 1.0), events(tmp_path / "other.jsonl", 0.5)

    assert pace.pace(pace.batches_of(one), 0) == pytest.approx(12 / 7)
    assert pace.table(one, other, [0, 2, 100]) == [
        "| after batches | one, 1/s | other, 1/s | ratio |",
        "|---|---|---|---|",
        "| 0 | 1.7 | 3.0 | 1.75 |",
        "| 2 | 2.0 | 4.0 | 2.00 |",
    ]


def test_a_pair_is_a_run_on_one_gpu_and_one_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command[4:]))

    pace.pair("ray", None, "cuda", tmp_path, ["--heads", "16"])
    pace.pair("local", None, "cpu", tmp_path, [])

    words = [" ".join(command) for command in ran]
    assert words[0].endswith("--quiet --device cuda:0 --heads 16")
    assert words[1].endswith("--executor ray --device all --address local --heads 16")
    assert words[2].endswith("--quiet --device cpu")
    assert words[3].endswith("--executor local --device cpu")
