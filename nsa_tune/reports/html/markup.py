"""Pieces of HTML. The texts of a table are escaped in the functions that put them in."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from html import escape
from importlib import resources

from nsa_tune.reports.formats.display_tables import DisplayTable


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return resources.files("nsa_tune.reports").joinpath("assets").joinpath(name).read_text("utf-8")


def packed_text(name: str, text: str) -> str:
    """An element that holds `text` for the script, deflated and in base64."""
    data = base64.b64encode(zlib.compress(text.encode(), 9)).decode() if text else ""
    return f'<script type="text/plain" id="{name}">{data}</script>'


def article(view: str, body: str, *, name: str = "", kind: str = "plain") -> str:
    """One card of a view. The script draws charts into cards with a `name`."""
    drawn = f' id="{escape(name)}"' if name else ""
    kind = "panel" if name else kind
    return f'<article class="{kind}"{drawn} data-view="{view}">{body}</article>'


def heading(table: DisplayTable) -> str:
    """A table's title and note."""
    return f"<h3>{escape(table.title)}</h3>{note(table.note)}"


def note(text: str) -> str:
    """Small print; empty for an empty text."""
    return f'<p class="note">{code(text)}</p>' if text else ""


def code(text: str) -> str:
    """Escaped text, with what stands between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def figure(kind: str) -> str:
    """The element that one chart is drawn into; the page's script writes its caption."""
    return f'<figure class="{kind}"><figcaption></figcaption><div class="chart"></div></figure>'


_WIDE = 5
"""Columns from which a table's rows are stacked on a phone."""


def said(number: str, label: str, sentence: str, basis: str = "") -> str:
    """An answer: a number and what it is, a sentence, and what both rest on."""
    small = f" <small>{escape(label)}</small>" if label else ""
    first = f'<p class="number">{escape(number)}{small}</p>' if number else ""
    return f'<div>{first}<p class="lead">{code(sentence)}</p>{note(basis)}</div>'


def html_table(table: DisplayTable, links: Sequence[str] = ()) -> str:
    """A table that scrolls sideways where it is too wide, also by keyboard; on a phone the rows of
    a wide one are stacked. `links` are where the rows' first cells lead."""
    rows = [[escape(cell) for cell in row] for row in table.rows]
    for row, link in zip(rows, links, strict=False):
        row[0] = f'<a href="{escape(link)}">{row[0]}</a>'
    wide = ' class="wide"' if len(table.columns) >= _WIDE else ""

    def attributes(i: int, cell: str = "") -> str:
        shown = wide and cell not in ("", "-")
        label = f' data-label="{escape(table.columns[i])}"' if shown else ""
        return f"{' class=number' if i in table.numeric else ''}{label}"

    titles = (f"<th{attributes(i)}>{escape(name)}</th>" for i, name in enumerate(table.columns))
    body = (
        f"<tr>{''.join(f'<td{attributes(i, cell)}>{cell}</td>' for i, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(table.title)}">'
        f"<table{wide}><thead><tr>{''.join(titles)}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
