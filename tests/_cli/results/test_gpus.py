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

    assert (listed.code, ships("gpus", "--db", "not-there.db").code) == (0, 1)
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
    pcie, b200 = (ships("gpus", gpu).out for gpu in ("H100 PCIe", "b200"))
    assert pcie.startswith("Not measured: NVIDIA H100 PCIe. Measure first: `nsa-tune run`")
    assert "SGLang's then does only what a start of the engine proves" in pcie
    assert "of NVIDIA H100 80GB HBM3, or where that has no table NVIDIA H200" in pcie
    assert "`nsa-tune run` on it. Until then `advise` has no answer" in b200


def test_what_to_do_with_a_table_is_told(ships: Shell) -> None:
    v4, *told = ships("tables", "H200").err.splitlines()

    assert "DeepSeek V4's tables are for reports" in v4
    assert (len(told), "GLM-5.2" in told[2], "advise" in told[3]) == (4, True, True)
    for line in told[:2]:
        assert ships(*shlex.split(line.partition(": nsa-tune ")[2])).code == 0


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "h200 nvl"])
def test_the_nvl_is_known_and_no_h200(ships: Shell, name: str) -> None:
    assert "NVIDIA H200 NVL" in ships("gpus", name).out
    assert "NVL" not in ships("gpus", "H200").out


def test_tables_of_a_database_count(database: Path, shell: Shell) -> None:
    assert H100.name in shell("gpus", "--db", str(database)).out
