"""A report as GitHub-flavoured Markdown."""

from __future__ import annotations

import re

from nsa_tune.reports.analysis.report import Report
from nsa_tune.reports.formats.display_tables import (
    DisplayTable,
    answer_texts,
    display_tables,
    fingerprint,
)
from nsa_tune.reports.formats.plain import plain


def as_markdown(report: Report) -> str:
    parts = ["# nsa-tune report\n"]
    for section in report.sections:
        parts.append(f"## {_escaped(section.title)}\n")
        parts += [f"{text}\n" for text in answer_texts(section)]
        for table in display_tables(section, report.baseline):
            parts.append(f"### {_escaped(table.title)}\n")
            if table.note:
                parts.append(f"{_escaped(table.note)}\n")
            parts.append(markdown_table(table))
        valid = DisplayTable("", ("field", "value"), tuple(fingerprint(section)))
        parts.append(f"### What the table is valid for\n\n{markdown_table(valid)}")
    return "\n".join(parts)


def markdown_table(table: DisplayTable) -> str:
    """The rows of `table`, without its title and note."""
    rule = ["--:" if i in table.numeric else ":--" for i in range(len(table.columns))]
    rows = [table.columns, tuple(rule), *table.rows]
    escaped = [rows[0], rows[1], *(tuple(map(_escaped, row)) for row in rows[2:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


_MARKUP = re.compile(r"[\\`*_{}\[\]<>|~&]")


def _escaped(text: str) -> str:
    """`text` as literal text: a name out of a database must not act as markup."""
    flat = plain(" ".join(text.split()))
    return _MARKUP.sub(lambda match: f"\\{match[0]}" if match[0] not in "<&" else
                       {"<": "&lt;", "&": "&amp;"}[match[0]], flat)  # fmt: skip
