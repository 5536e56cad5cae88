"""The command line: data on stdout, talk on stderr, exit codes, and sentences for bad input."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import nsa_tune
from nsa_tune import _errors
from nsa_tune._cli.results import report as reporting
from nsa_tune._errors import NsaTuneError
from nsa_tune.db import reader as tables
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import read_text
from tests.reports.synthetic import H100
from tests.shell import GPU, Result, Shell

# --- lookup and explain


def test_lookup_prints_one_decision_a_line(shell: Shell, database: Path) -> None:
    answer = shell("lookup", "extend:1920+128", *GPU, "--db", str(database))

    decisions = dict(line.split(" = ") for line in answer.out.splitlines())
    assert answer.code == 0
    assert decisions["prefill_path"] == "mla"
    assert "indexer_layout" not in decisions
    assert answer.err.startswith(f"by {database}, measured ")


def test_lookup_has_a_document(shell: Shell, database: Path) -> None:
    answer = shell("lookup", "extend:0+300,512+64", *GPU, "--db", str(database), "--json")

    document = json.loads(answer.out)
    assert document["schema"] == "nsa-tune/lookup/1"
    assert document["batch"] == "extend:0+300,512+64"
    assert document["tuned"] is True


def test_a_captured_pass_is_never_dense(shell: Shell, database: Path) -> None:
    batch = ("lookup", "extend:0+2048", *GPU, "--db", str(database), "--json")

    assert json.loads(shell(*batch).out)["plan"]["prefill_path"] == "mha"
    assert json.loads(shell(*batch, "--captured").out)["plan"]["prefill_path"] == "mla"


def test_without_a_table_the_rule_answers_and_stderr_says_so(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    answer = shell("lookup", "extend:0+128", *GPU, "--json")

    assert answer.code == 0
    assert json.loads(answer.out)["tuned"] is False
    assert "nothing is tuned for deepseek-v3.2 with 128 local heads" in caplog.text


def test_a_missing_file_in_nsa_tune_db_is_told_once(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", "/nowhere/some.db")

    answer = shell("lookup", "extend:0+128", *GPU)

    assert answer.code == 0
    told = [one.getMessage() for one in caplog.records if "/nowhere/some.db" in one.getMessage()]
    assert told == ["NSA_TUNE_DB is '/nowhere/some.db', and there is no such file: it is skipped"]


def test_strict_makes_a_miss_an_error(shell: Shell, database: Path) -> None:
    answer = shell(
        "lookup", "extend:0+128", *GPU, "--heads", "64", "--strict", "--db", str(database)
    )

    assert answer.code == 3
    assert answer.out == ""
    assert "heads" in answer.err


def test_explain_gives_reasons_in_words_and_as_json(shell: Shell, database: Path) -> None:
    command = ("explain", "extend:1024+512", *GPU, "--db", str(database))

    text, document = shell(*command), json.loads(shell(*command, "--json").out)

    assert "prefill_path = " in text.out
    assert document["schema"] == "nsa-tune/explain/2"
    assert document["reasons"].keys() >= {"prefill_path", "sparse_prefill"}
    reason = document["reasons"]["prefill_path"]
    assert reason["estimates_us"].keys() == {"mha", "mla"} == reason["intervals_us"].keys()
    assert reason["text"] in text.out
    assert document["key"]["gpu"] == H100.name


def test_explain_shows_where_a_layer_s_time_goes(shell: Shell, database: Path) -> None:
    command = ("explain", "extend:30000+512", "--layer", *GPU, "--db", str(database))

    text, document = shell(*command), json.loads(shell(*command, "--json").out)

    assert "Attention time of a pass: " in text.out
    assert document["schema"] == "nsa-tune/explain/2"
    steps = {step["name"]: step for step in document["layer"]["steps"]}
    assert f"mla/{document['plan']['sparse_prefill']}" == steps["attention"]["arm"]
    assert "the table has no times of indexer_topk" in steps["top-k"]["note"]
    assert "layer" not in json.loads(shell(*command[:2], *command[3:], "--json").out)


def test_layers_spread_what_is_computed_once_a_pass(shell: Shell) -> None:
    # Behind a long prefix flashmla_kv is the fastest layer, but its schedule costs each pass more
    # than that of one row for all queries.
    table = Path(nsa_tune.__file__).parent / "tables" / "h200_deepseek-v3.2_h16_fp8.tsv"
    command = ("lookup", "extend:3031+35", "--gpu", "NVIDIA H200", "--heads", "16",
               "--db", str(table), "--json")  # fmt: skip

    whole, one = (json.loads(shell(*command, *more).out) for more in ((), ("--layers", "1")))

    assert (whole["layers"], whole["plan"]["sparse_prefill"]) == (61, "flashmla_kv")
    assert (one["layers"], one["plan"]["sparse_prefill"]) == (1, "flashmla_kv_mixed")
    assert shell(*command, "--layers", "0").code == 2


# --- report


@pytest.fixture
def few(database: Path) -> Path:
    """One point alone, of which a report is made soon."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM measurements WHERE point <> 'indexer_layout'")
    return database


@pytest.mark.parametrize("form", ["terminal", "md", "csv", "json", "html"])
def test_a_report_goes_to_stdout_or_to_a_file(
    shell: Shell, few: Path, tmp_path: Path, form: str
) -> None:
    command = ("report", "--heads", "16", "--db", str(few), "--format", form)

    shown, path = shell(*command), tmp_path / "out"
    written = shell(*command, "--out", str(path))

    assert (shown.code, written.code) == (0, 0)
    assert written.out == ""
    assert written.err == f"wrote {path}\n"
    assert path.read_text(encoding="utf-8").strip() == shown.out.strip()
    assert "NVIDIA H100 80GB HBM3" in shown.out


def test_reports_take_what_the_options_match(shell: Shell, few: Path) -> None:
    every = json.loads(shell("report", "--json", "--db", str(few)).out)
    one = json.loads(shell("report", "--json", "--heads", "16", "--db", str(few)).out)

    assert [section["key"]["heads"] for section in one["sections"]] == [16]
    assert {section["key"]["heads"] for section in every["sections"]} == {16, 128}


def test_csv_has_a_row_for_each_choice_on_each_batch(shell: Shell, database: Path) -> None:
    answer = shell("report", "--format", "csv", "--db", str(database))

    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert {"mha", "mla"} <= {row["choice"] for row in rows}


def test_without_vl_convert_the_page_is_written_and_stderr_says_what_is_missing(
    shell: Shell, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    path = tmp_path / "report.html"

    answer = shell("report", "--format", "html", "--out", str(path), "--db", str(few))

    assert answer.code == 0
    assert "pip install '.[report]'" in answer.err
    assert "<table>" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "options", "begins"),
    [
        ("r.html", (), "<!doctype html>"),
        ("R.HTML", (), "<!doctype html>"),
        ("r.md", (), "# nsa-tune"),
        ("r.json", (), "{"),
        ("r.html", ("--format", "json"), "{"),
        ("r.txt", (), "NVIDIA H100"),
    ],
)
def test_the_ending_of_a_file_names_the_format_of_a_report(
    shell: Shell, few: Path, tmp_path: Path, name: str, options: tuple[str, ...], begins: str
) -> None:
    answer = shell("report", *options, "--out", str(tmp_path / name), "--db", str(few))

    assert answer.code == 0
    assert (tmp_path / name).read_text(encoding="utf-8").lstrip().lower().startswith(begins.lower())


def test_nothing_measured_is_exit_code_3(shell: Shell) -> None:
    answer = shell("report")

    assert (answer.code, answer.out) == (3, "")
    assert answer.err == (
        "nsa-tune: nothing is measured yet, and no table ships; measure with `nsa-tune run`\n"
    )


# --- run, on this machine's processor

_RUN = ("run", "--device", "cpu", "--points", "indexer_layout", "--budget", "0")


def test_a_run_ends_with_the_crossover_table(shell: Shell, tmp_path: Path) -> None:
    path = str(tmp_path / "run.db")

    first = shell(*_RUN, "--db", path)
    second = shell(*_RUN, "--db", path, "--json", "--quiet")

    assert first.code == second.code == 0
    assert "tiny, 4 local heads" in first.out
    assert "tiny, 4 local heads, fp8_packed" in first.err
    assert "budget: " in first.err
    document = json.loads(second.out)
    assert document["schema"] == "nsa-tune/run/3"
    assert document["outcome"] == "budget"
    assert document["skipped"] > 0 < document["measured"]
    assert second.err == ""


def test_an_interrupted_run_prints_what_it_has_and_leaves_with_130(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_tune.autotune.bench.measure import measure_batch
    from nsa_tune.autotune.worker import server

    calls = []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return measure_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "measure_batch", interrupted)
    answer = shell(
        *_RUN[:-2], "--no-isolate", "--db", str(tmp_path / "run.db"), "--json", "--quiet"
    )

    assert answer.code == 130
    document = json.loads(answer.out)
    assert document["outcome"] == "interrupted"
    assert document["measured"] > 0


def test_an_interrupt_anywhere_is_130(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reporting, "select_tables", interrupted)

    assert shell("report").code == 130


# --- doctor and db


def test_doctor_ends_with_one_line(shell: Shell, database: Path) -> None:
    text = shell("doctor", "--db", str(database))
    document = json.loads(shell("doctor", "--db", str(database), "--json").out)

    assert text.out.splitlines()[-1] == document["conclusion"]
    assert document["schema"] == "nsa-tune/doctor/1"
    assert text.code == (0 if document["fit"] else 5)


def test_an_unfit_machine_is_exit_code_5(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "bad.db"
    path.write_text("no database")

    assert shell("doctor", "--db", str(path)).code == 5


def test_a_table_goes_out_and_in_again(shell: Shell, database: Path, tmp_path: Path) -> None:
    text, other = str(tmp_path / "out.txt"), str(tmp_path / "other.db")
    before = json.loads(shell("db", "list", "--db", str(database), "--json").out)["tables"]

    several = shell("db", "export", "--out", text, "--db", str(database))
    one = shell("db", "export", "--out", text, "--heads", "16", "--db", str(database))
    imported = shell("db", "import", text, "--db", other)
    again = shell("db", "import", text, "--db", other)

    after = json.loads(shell("db", "list", "--db", other, "--json").out)
    assert several.code == 2
    assert all(table["digest"] in several.err for table in before)
    assert (one.code, imported.code) == (0, 0)
    assert after["schema"] == "nsa-tune/db-list/1"
    assert [table["key"] for table in after["tables"]] == [
        table["key"] for table in before if table["key"]["heads"] == 16
    ]
    assert again.err.startswith("0 measurements added")


def test_runs_are_listed_by_the_number_that_compare_takes(shell: Shell, database: Path) -> None:
    listed = shell("db", "list", "--runs", "--db", str(database)).out.splitlines()
    document = json.loads(shell("db", "list", "--runs", "--db", str(database), "--json").out)
    plain = json.loads(shell("db", "list", "--db", str(database), "--json").out)

    digests, runs = listed[::2], [line.split()[0] for line in listed[1::2]]
    assert [digest.split()[0] for digest in digests] == [
        table["digest"] for table in document["tables"]
    ]
    assert runs == [f"run:{table['runs'][0]['run']}" for table in document["tables"]]
    assert runs == ["run:1", "run:2"]
    assert "import of some.tsv: " in listed[1]
    assert not any("runs" in table for table in plain["tables"])
    side = f"{database}@{runs[0]}"
    assert shell("compare", side, side).code == 0


def test_only_runs_that_measured_something_are_listed(
    shell: Shell, database: Path, tmp_path: Path
) -> None:
    (one, _) = tables.read_database(database)
    path = tmp_path / "runs.db"
    with Store.open(path) as store:
        store.begin_run(one.key, one.device, {})
        number = store.begin_run(one.key, one.device, {"fresh": True})
        store.add(number, one.measurements[:1])

    _, listed = shell("db", "list", "--runs", "--db", str(path)).out.splitlines()

    assert listed.startswith("    run:2  started 20")
    assert listed.endswith(", running, or killed: 1 measurement")


def test_a_run_that_is_not_there_is_answered_with_the_command_that_lists_them(
    shell: Shell, database: Path
) -> None:
    missing = shell("compare", f"{database}@run:99", str(database))
    unnamed = shell("compare", f"{database}@run:x", str(database))

    assert (missing.code, unnamed.code) == (3, 2)
    assert f"`nsa-tune db list --runs --db {database}` lists those that did" in missing.err
    assert "`nsa-tune db list --runs` shows" in unnamed.err


def test_an_export_by_digest_takes_that_table(shell: Shell, database: Path, tmp_path: Path) -> None:
    text = tmp_path / "out.tsv"
    listed = shell("db", "list", "--db", str(database)).out.splitlines()
    digest = listed[0].split()[0]

    answer = shell("db", "export", "--key", digest[:8], "--out", str(text), "--db", str(database))

    assert answer.code == 0
    assert read_text(text).key.digest == digest


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["lookup", "nonsense"], 2, "is no batch"),
        (["lookup"], 2, "is no batch; write extend:PREFIX+NEW"),
        (["lookup", "extend:0+0"], 2, "new lengths at least 1"),
        (["lookup", "extend:0+9999999999"], 2, "int32"),
        (["lookup", "extend:0+8", "--model", "gpt-2"], 2, "unknown model 'gpt-2'"),
        (["lookup", "extend:0+8", "--model", "tiny", "--heads", "3"], 2, "do not divide"),
        (["lookup", "extend:0+8", "--kv-dtype", "fp3"], 2, "--kv-dtype"),
        (["run", "--device", "tpu"], 2, "unknown device 'tpu'"),
        (["run", "--device", "cuda:99"], 5, "there is no GPU"),
        (["run"], 5, "--device cpu shows how a run works"),
        (["run", "--points", "decode,nothing", "--device", "cpu"], 2, "unknown decision point"),
        (["run", "--points", "decode,", "--device", "cpu"], 2, "lacks a name"),
        (["run", "--points", "", "--device", "cpu"], 2, "lacks a name"),
        (["run", "--points", "v4_prefill", "--device", "cpu"], 2, "it arises in: deepseek-v4"),
        (
            ["run", "--points", "decode", "--model", "tiny-v4", "--device", "cpu"],
            2,
            "does not arise",
        ),
        (["run", "--model", "tiny", "--heads", "3", "--device", "cpu"], 2, "do not divide"),
        (["run", "--budget", "-1"], 2, "--budget"),
        (["report", "--format", "pdf"], 2, "--format"),
        (["db", "import", "/nowhere/table.tsv"], 1, "/nowhere/table.tsv"),
        (["report", "--nonsense"], 2, "--nonsense"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_is_a_sentence_and_a_code(
    shell: Shell, arguments: Sequence[str], code: int, words: str
) -> None:
    answer = shell(*arguments)

    assert answer.code == code
    assert answer.out == ""
    assert words in " ".join(answer.err.split())
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "command",
    [
        ["lookup", "extend:0+8"],
        ["explain", "extend:0+8"],
        ["report"],
        ["check", "--device", "cpu"],
        ["advise", "--gpu", "NVIDIA H200"],
        ["db", "list"],
        ["db", "export", "--out", "table.tsv"],
        ["db", "push", "http://localhost:9", "--checks"],
        ["db", "push", "http://localhost:9", "--tables"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_missing_database_is_one_sentence_in_every_command_that_reads_it(
    shell: Shell, caplog: pytest.LogCaptureFixture, command: Sequence[str]
) -> None:
    answer = shell(*command, "--db", "/nowhere/some.db")

    assert (answer.code, answer.out) == (1, "")
    # `push` warns first that the address is not encrypted.
    assert answer.err.splitlines()[-1] == (
        "nsa-tune: there is no file /nowhere/some.db; give another one, or measure one with "
        "`nsa-tune run`"
    )
    assert caplog.records == []


def test_a_database_that_is_none_is_an_error_of_lookup(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("no database\n" * 100)

    answer = shell("lookup", "extend:0+8", "--db", str(path))

    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        f"nsa-tune: {path} is not an SQLite database; give the path of another with --db\n"
    )


def test_a_file_that_cannot_be_written_is_a_sentence(
    shell: Shell, few: Path, tmp_path: Path
) -> None:
    answer = shell("report", "--out", str(tmp_path / "no" / "file"), "--db", str(few))

    assert answer.code == 1
    assert "cannot be written (No such file or directory); give another file" in answer.err


@pytest.mark.parametrize(
    "error", [error for error in vars(_errors).values() if isinstance(error, type)]
)
def test_every_error_becomes_its_exit_code(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: type[NsaTuneError]
) -> None:
    def failing(*_: object) -> None:
        raise error("what is wrong, and what to do\x1b[31m")

    monkeypatch.setattr(reporting, "select_tables", failing)

    answer = shell("report")

    assert answer.code == error.exit_code
    assert answer.err == "nsa-tune: what is wrong, and what to do?[31m\n"


def test_the_version_is_printed(shell: Shell) -> None:
    assert shell("--version") == Result(0, f"{nsa_tune.__version__}\n", "")
