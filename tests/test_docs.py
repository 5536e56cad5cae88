"""Every command and option is documented in docs/cli.md and has help; nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from nsa_tune._cli.shared.options import Format
from nsa_tune.backend.dispatch.plan import COPIES
from nsa_tune.backend.libraries.limits import PROBED
from nsa_tune.backend.points import POINTS
from nsa_tune.cli import app
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.analysis.selection import TableFilter, select_tables

DOCS = Path(__file__).parent.parent / "docs"
CLI = (DOCS / "cli.md").read_text(encoding="utf-8")
REPORTS = (DOCS / "reports.md").read_text(encoding="utf-8")


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, command) of everything that can be typed."""
    children = getattr(command, "commands", {})
    if not children or name == "nsa-tune":
        yield name, command
    shown = (pair for pair in children.items() if not pair[1].hidden)
    for child, below in shown:
        yield from _commands(below, f"{name} {child}")


COMMANDS = dict(_commands(typer.main.get_command(app), "nsa-tune"))
SECTIONS = {
    part.splitlines()[0]: part for part in CLI.split("\n## ") if part.startswith("nsa-tune")
}
_each = pytest.mark.parametrize("name", COMMANDS)


def _options(name: str) -> set[str]:
    found = {
        word
        for parameter in COMMANDS[name].params
        for word in (*parameter.opts, *parameter.secondary_opts)
        if word.startswith("-")
    }
    return found - {"-h", "--help"}


def test_each_command_has_a_section_and_each_section_a_command() -> None:
    assert list(SECTIONS) == list(COMMANDS)


@_each
def test_a_command_and_its_options_have_help(name: str) -> None:
    command = COMMANDS[name]

    assert command.help
    assert "\n" not in command.help.replace("\n\n", ""), "terminals wrap paragraphs themselves"
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name


@_each
def test_exactly_the_options_that_exist_are_documented(name: str) -> None:
    rows = [line for line in SECTIONS[name].splitlines() if line.startswith("| `-")]
    documented = {
        word for row in rows for word in re.findall(r"`(--?[a-z0-9-]+)`", row.split(" | ")[0])
    }

    assert documented == _options(name)


_SCHEMAS = [
    "run", "event", "probe", "lookup", "explain", "report", "replay", "compare", "live",
    "doctor", "db-list", "db-merge",
]  # fmt: skip


@pytest.mark.parametrize("schema", _SCHEMAS)
def test_schemas_are_documented(schema: str) -> None:
    assert re.search(rf"`nsa-tune/{schema}/\d+`", CLI)


def test_formats_are_documented() -> None:
    for word in Format:
        assert f"`{word}`" in CLI
        assert f"| `{word}` |" in REPORTS


# --- docs/reports.md


def test_the_page_on_reports_shows_what_the_shipped_table_reports() -> None:
    """Its sentence, and the picture's title: both change when the table or the fits do."""
    wanted = TableFilter("NVIDIA H100 80GB HBM3", "deepseek-v3.2", 128, "fp8_packed")
    (section,) = build(select_tables(None, wanted)).sections
    lines = [line for p in section.points for q in p.questions for line in q.lines]
    picture = (DOCS / "crossovers.svg").read_text(encoding="utf-8")

    (shown,) = re.findall(r"^    (Prefill: MHA or MLA, .*)$", REPORTS, re.MULTILINE)
    assert shown in [line.sentence for line in lines]
    assert shown in picture, "draw docs/crossovers.svg as docs/reports.md says"


# --- docs/decision-points.md


POINTS_PAGE = (DOCS / "decision-points.md").read_text(encoding="utf-8")


def _rows_under(heading: str) -> Iterator[list[str]]:
    """The cells of every table row of a section."""
    section = POINTS_PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_limit_that_can_be_probed_is_documented() -> None:
    section = SECTIONS["nsa-tune probe"]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(PROBED)


@pytest.mark.parametrize("name", [name for name in POINTS if not POINTS[name].group])
def test_the_page_names_every_arm_of_a_point(name: str) -> None:
    section = POINTS_PAGE.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    rows = " ".join(row[0] for row in _rows_under(f"`{name}`"))
    layout = POINTS[name] is POINTS["indexer_layout"]

    assert section
    for arm in POINTS[name].arms:
        word = arm.name.partition("/")[0] if layout else arm.name
        assert f"`{word}`" in rows, f"docs/decision-points.md, {name}: no row for {word}"


def test_the_page_tells_by_what_each_layout_is_copied() -> None:
    told = {row[1] for row in _rows_under("KV layouts") if len(row) == 4}

    assert told >= {f"`{kernel}`" for copies in COPIES.values() for kernel in copies.values()}


def test_the_public_traces_of_the_examples_can_be_found() -> None:
    replay = (DOCS / "replay.md").read_text(encoding="utf-8")
    section = replay.split("\n## Traces\n")[1].split("\n## ")[0]

    for repository, file in (
        ("kvcache-ai/Mooncake", "FAST25-release/traces/conversation_trace.jsonl"),
        ("Azure/AzurePublicDataset", "data/AzureLLMInferenceTrace_conv.csv"),
    ):
        assert f"(https://github.com/{repository})" in section
        assert f"`{file}`" in section
