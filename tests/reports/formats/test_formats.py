"""JSON, CSV, markdown and terminal text of one report."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from nsa_tune.reports.analysis.report import Report, build
from nsa_tune.reports.analysis.words import question_title
from nsa_tune.reports.formats.flat_table import COLUMNS, as_csv
from nsa_tune.reports.formats.json_document import SCHEMA, as_json
from nsa_tune.reports.formats.markdown import as_markdown
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import as_terminal_text, print_crossovers, print_report
from tests.reports.synthetic import hostile_table, real_table

HOSTILE = "<script>alert(1)</script> [red]|`*_\"'\x1b[31m\x07\u202eevil\n# heading \U0001f980"


@pytest.fixture(scope="module")
def report() -> Report:
    return build([real_table(), real_table(heads=16, points=("indexer_layout",))])


@pytest.fixture(scope="module")
def hostile() -> Report:
    return build([hostile_table(HOSTILE)])


def test_json_has_a_versioned_schema_and_every_finding(report: Report) -> None:
    document = json.loads(as_json(report))

    assert document["schema"] == SCHEMA == "nsa-tune/report/3"
    first = document["sections"][0]
    questions = {one["question"]: one for point in first["points"] for one in point["questions"]}
    lines = [line for question in report.sections[0].questions for line in question.lines]
    assert [line["sentence"] for one in questions.values() for line in one["lines"]] == [
        line.sentence for line in lines
    ]
    edge = next(edge for line in questions["prefill_path"]["lines"] for edge in line["edges"])
    assert edge.keys() == {"left", "right", "value", "low", "high", "limit"}
    assert questions["prefill_path"]["cost"]["default"]["worst"] > 1
    assert first["key"]["libraries"] == dict(report.sections[0].key.libraries)
    assert first["digest"] == report.sections[0].key.digest


def test_csv_reads_back_with_its_columns(report: Report) -> None:
    rows = list(csv.reader(io.StringIO(as_csv(report))))

    assert tuple(rows[0]) == COLUMNS
    cells = [cell for one in report.sections for q in one.questions for cell in q.cells]
    assert len(rows) == 1 + sum(len(cell.times) for cell in cells)
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_markdown_has_a_table_for_each_grid(report: Report) -> None:
    text = as_markdown(report)

    assert text.startswith("# nsa-tune report\n")
    assert "### Prefill: MHA or MLA by new tokens" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1


def test_markdown_keeps_hostile_names_as_words(hostile: Report) -> None:
    text = as_markdown(hostile)

    assert "<script>" not in text
    assert "\n# heading" not in text
    assert "\x1b" not in text


def test_a_terminal_gets_no_control_characters_from_a_table(hostile: Report) -> None:
    text = as_terminal_text(hostile)

    assert "[red]" in text
    assert "\U0001f980" in text
    assert not {character for character in text if ord(character) < 32} - {"\n"}
    assert "\u202e" not in text


def test_the_terminal_says_the_same_without_colour(report: Report) -> None:
    def shown(colour: bool) -> str:
        console = Console(
            file=io.StringIO(), width=150, force_terminal=colour, no_color=not colour,
            legacy_windows=False,
        )  # fmt: skip
        with console.capture() as captured:
            print_report(report, console)
        return captured.get()

    coloured, bare = shown(True), shown(False)
    assert coloured != bare
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == bare


def test_the_crossovers_alone_name_every_question_with_lines(report: Report) -> None:
    console = Console(file=io.StringIO(), width=150)
    with console.capture() as captured:
        print_crossovers(report, console)

    text = captured.get()
    for question in report.sections[0].questions:
        assert all(
            question_title(question.name, line.slice.mode) in text for line in question.lines
        )
    assert "Cost of the default" not in text


def test_plain_text_stays_as_it_is() -> None:
    assert plain("extend:0+128 µs 12.5") == "extend:0+128 µs 12.5"


def test_a_spreadsheet_runs_nothing_out_of_a_csv() -> None:
    table = real_table(points=("indexer_layout",))
    report = build([replace(table, key=replace(table.key, gpu="@SUM(1)"))])

    rows = list(csv.reader(io.StringIO(as_csv(report))))

    assert rows[1][0] == "'@SUM(1)"
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)


def test_a_report_does_not_say_where_its_database_lies() -> None:
    table = replace(real_table(points=("indexer_layout",)), source="/home/someone/secret/a.db")
    report = build([table])

    assert json.loads(as_json(report))["sections"][0]["source"] == "a.db"
    for text in (as_json(report), as_markdown(report), as_terminal_text(report)):
        assert "secret" not in text
