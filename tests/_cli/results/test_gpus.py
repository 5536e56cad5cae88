"""gpus: whether one's GPU is known, and what was measured on it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from nsa_tune.backend.hardware import detect
from tests.reports.synthetic import H100
from tests.shell import Shell


@pytest.fixture
def ships(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs commands where tables ship and nothing was measured."""
    monkeypatch.setenv("XDG_DATA_DIRS", "/nowhere")
    return Shell(capsys)


def test_every_known_gpu_is_listed_with_what_was_measured(ships: Shell) -> None:
    listed = ships("gpus")

    assert listed.code == 0
    assert all(name in listed.out for name in detect.KNOWN)
    h200 = [line for line in listed.out.splitlines() if " NVIDIA H200 " in line]
    assert "8, 16, 32, 64, 128" in next(line for line in h200 if "deepseek-v3.2" in line)


def test_the_document_says_for_which_heads_whole_passes_ship(ships: Shell) -> None:
    found = json.loads(ships("gpus", "h200", "--json").out)

    assert found["schema"] == "nsa-tune/gpus/1"
    rows = {(row["model"], row["kv_dtype"]): row for row in found["measured"]}
    assert {row["gpu"] for row in found["measured"]} == {"NVIDIA H200"}
    assert set(rows["deepseek-v3.2", "bf16"]["passes"]) >= {16, 128}
    assert rows["deepseek-v4", "fp8"]["passes"] == []


def test_of_a_gpu_without_tables_it_is_said_whose_times_answer(ships: Shell) -> None:
    assert "the times of NVIDIA H100 80GB HBM3 or NVIDIA H200" in ships("gpus", "H100 PCIe").out
    assert "No other GPU's times stand for it; `nsa-tune run`" in ships("gpus", "b200").out


def test_what_to_do_with_a_table_is_told(ships: Shell) -> None:
    told = ships("tables", "H200").err.splitlines()

    assert (len(told), "advise" in told[2]) == (3, True)
    for line in told[:2]:
        assert ships(*shlex.split(line.partition(": nsa-tune ")[2])).code == 0


def test_tables_of_a_database_count(database: Path, shell: Shell) -> None:
    assert H100.name in shell("gpus", "--db", str(database)).out
