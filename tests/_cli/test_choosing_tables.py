"""Which GPU and which tables a command is for, where little or nothing is said."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_tune import UsageError, cli
from nsa_tune._cli.shared.gpus import full_name, name_for_job
from nsa_tune.db import places
from tests.reports.synthetic import H100
from tests.shell import Shell

MIXTURE = ("lookup", "extend:1920+128", "--heads", "16")


@pytest.fixture
def ships(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs commands where tables ship and nothing was measured."""
    monkeypatch.setenv("XDG_DATA_DIRS", "/nowhere")
    return Shell(capsys)


# --- a GPU by a part of its name


def test_a_part_of_a_gpu_s_name_is_enough(ships: Shell) -> None:
    part, whole = (ships(*MIXTURE, "--gpu", gpu) for gpu in ("h200", "NVIDIA H200"))

    assert part.code == whole.code == 0
    assert part.out == whole.out
    assert "flashmla" in part.out


def test_a_job_takes_a_part_of_a_known_name_and_any_name_that_nobody_knows() -> None:
    assert [name_for_job(gpu) for gpu in ("h200", "H20", "NVIDIA H20", "NVIDIA XYZ")] == [
        "NVIDIA H200", "NVIDIA H20", "NVIDIA H20", "NVIDIA XYZ",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'NVIDIA H100 80GB HBM3', 'NVIDIA H100 NVL'"):
        name_for_job("H100")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 SXM", "NVIDIA H100 80GB HBM3"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("nvidia h200", "NVIDIA H200"),
        ("H20", "NVIDIA H20"),
        ("gh200", "NVIDIA GH200 480GB"),
    ],
)
def test_a_gpu_is_what_people_call_it(typed: str, name: str) -> None:
    assert full_name(typed) == name


@pytest.mark.parametrize(
    "words",
    [
        MIXTURE, ("explain", *MIXTURE[1:]), ("report",), ("db", "export", "-o", "x.tsv"),
        ("advise",),
    ],
)  # fmt: skip
def test_a_gpu_without_tables_is_told_which_have_some(words: tuple[str, ...], ships: Shell) -> None:
    answer = ships(*words, "--gpu", "B300")

    assert answer.code == 3
    assert answer.out == ""
    assert answer.err == (
        "nsa-tune: 'B300' is no GPU that nsa-tune knows: there are tables of 'NVIDIA H100 80GB "
        "HBM3', 'NVIDIA H200', and `nsa-tune gpus` lists what is known; `nsa-tune run` measures "
        "another one\n"
    )


def test_a_part_of_two_names_is_refused_with_both(ships: Shell) -> None:
    answer = ships(*MIXTURE, "--gpu", "NVIDIA")

    assert answer.code == 2
    assert "may be 'NVIDIA H100 80GB HBM3', 'NVIDIA H200'; write more of the name" in answer.err


def test_tables_of_the_named_database_count(database: Path, shell: Shell) -> None:
    answer = shell("db", "list", "--json", "--db", str(database))
    assert H100.name in answer.out

    answer = shell(*MIXTURE, "--gpu", "H100", "--db", str(database))

    assert answer.code == 0
    assert "prefill_path" in answer.out


def test_a_machine_without_a_gpu_says_so_where_heads_do_not_fit(ships: Shell) -> None:
    answer = ships(*MIXTURE)

    assert answer.code == 2
    assert "this machine has no GPU" in answer.err
    assert "'NVIDIA H200'" in answer.err


# --- nothing measured


def test_without_a_database_the_shipped_tables_are_listed(ships: Shell) -> None:
    answer = ships("db", "list")

    assert answer.code == 0
    assert len(answer.out.splitlines()) == len(places.shipped())
    assert "there is no database yet" in answer.err


def test_a_shipped_table_can_be_exported(ships: Shell, tmp_path: Path) -> None:
    out = tmp_path / "t.tsv"
    options = ("--gpu", "H200", "--heads", "16", "--model", "deepseek-v3.2", "--kv-dtype", "fp8")

    assert ships("db", "export", "-o", str(out), *options).code == 0
    (path,) = (path for path in places.shipped() if path.stem == "h200_deepseek-v3.2_h16_fp8")
    assert out.read_text() == path.read_text()


def test_a_report_of_everything_that_ships_asks_for_a_choice(ships: Shell) -> None:
    answer = ships("report", "--json")
    *listed, said = answer.err.splitlines()

    assert (answer.code, answer.out, len(listed)) == (2, "", len(places.shipped()))
    assert "nsa-tune advise --gpu H200" in said
    assert ships(*shlex.split(listed[-1])[1:]).code == 0


# --- a reader that goes away


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nsa_tune.cli", "db", "list"]
    variables = {**os.environ, "XDG_DATA_DIRS": str(tmp_path)}
    child = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.close()

    _, err = child.communicate(timeout=120)

    assert child.returncode == 0
    assert err == "there is no database yet: these are the tables that ship with nsa-tune\n"


# --- help


def test_commands_are_shown_in_groups(ships: Shell) -> None:
    panels = {
        command.name or command.callback.__name__: command.rich_help_panel
        for command in cli.app.registered_commands
        if command.callback is not None
    }

    assert {panels[name] for name in ("run", "report", "lookup")} == {"Tables"}
    assert {panels[name] for name in ("advise", "doctor")} == {"Engine"}
    assert {panels[name] for name in ("serve", "worker")} == {"Fleet"}
