"""Regret is against the best of all that ran, and intervals are as wide as sweeps scatter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.comparison import Engine
from benchmarks.engine.regret import batches_of, main
from benchmarks.engine.run import SCHEMA

_NAMES = ("default", "plugin", "fa3", "way:sparse_graph")


def _row(new: int, times: Mapping[str, float], noise: float) -> dict[str, Any]:
    scale = {"1": 1.0, "2": 1 + noise, "3": 1 - noise}
    return {
        "case": f"0+{new} x1", "prefix": [0], "new": [new],
        "configurations": {
            name: {
                "ran": [f"{name} ran"], "host_ms": 1.0, "gpu_ms": ms,
                "sweeps": {"gpu_ms": {
                    i: ms * (by if name == "plugin" else 1) for i, by in scale.items()
                }},
            }
            for name, ms in times.items()
        },
    }  # fmt: skip


def _document(noise: float = 0.001) -> dict[str, Any]:
    """Two batches: one that a way not taken wins, one that the plug-in does."""
    first = dict(zip(_NAMES, (100.0, 104.0, 90.0, 80.0), strict=True))
    second = {"default": 200.0, "plugin": 50.0, "fa3": 150.0}
    return {
        "schema": SCHEMA, "label": "made up",
        "configurations": [
            {"name": name, "plugin": name[0] in "pw", "pass_mode": name.partition(":")[2] or None}
            for name in _NAMES
        ],
        "tests": {
            "prefill": [_row(300, first, noise), _row(900, second, noise), {"case": "late"}],
            "profile": [
                {"case": "0+900 x1", "configuration": "plugin", "busy_ms": 45}
            ],
        },
    }  # fmt: skip


def test_each_batch_is_held_against_the_best_of_all() -> None:
    lost, won = batches_of([Engine("made up", _document())], "prefill")

    assert (lost.best, lost.flag, won.best, won.flag) == (
        "way:sparse_graph", "fa3", "plugin", "fa3",
    )  # fmt: skip
    assert lost.ratio("way:sparse_graph", {False: 0.0})[0] == pytest.approx(1.3)
    assert (lost.least_ms, won.least_ms) == (80, 45)
    assert won.idle("plugin") == pytest.approx(0.1) and won.idle("default") is None


def test_the_page_says_what_is_surely_slower_than_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(_document()))
    assert main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "mean 15.0%, worst 30.0% (0+300)" in said
    assert "beyond the interval: 1 ['0+300']" in said
    assert said.index("| 0+300 |") < said.index("| 0+900 |"), "the largest regret comes first"

    path.write_text(json.dumps(_document(noise=0.08)))
    assert main([str(path)]) == 0, "four percent are nothing if sweeps differ by eight"

    # Of two engines of the same label one batch is the same.
    (other := tmp_path / "other.json").write_text(path.read_text().replace("900", "901"))
    assert main([str(path), str(other)]) == 0 and "made up, 3 batches" in capsys.readouterr().out
