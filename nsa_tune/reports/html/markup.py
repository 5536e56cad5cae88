"""Pieces of HTML. The texts of a table are escaped in the functions that put them in."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable
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


def figure(kind: str, caption: str = "") -> str:
    """The element that one chart is drawn into."""
    return (
        f'<figure class="{kind}"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="chart"></div></figure>'
    )


def select(name: str, label: str, values: Iterable[str]) -> str:
    """A labelled drop-down list."""
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    return f'<label>{escape(label)} <select name="{name}">{options}</select></label>'


def html_table(table: DisplayTable) -> str:
    """A table that scrolls sideways where it is too wide, also by keyboard."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in table.numeric else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{cells('th', table.columns)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
