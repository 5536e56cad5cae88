"""Pieces of HTML. Every text that came out of a table is escaped here and nowhere else."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from html import escape
from importlib import resources

from nsa_tune.reports.output.grids import Grid

__all__ = [
    "article",
    "asset",
    "attributes",
    "figure",
    "grid_table",
    "heading",
    "note",
    "packed_text",
    "select",
]


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return resources.files("nsa_tune.reports").joinpath("assets").joinpath(name).read_text("utf-8")


def packed_text(name: str, text: str) -> str:
    """An element that holds `text` for the script: deflated, and in base64, which is no markup."""
    data = base64.b64encode(zlib.compress(text.encode(), 9)).decode() if text else ""
    return f'<script type="text/plain" id="{name}">{data}</script>'


def attributes(facts: Iterable[tuple[str, str]]) -> str:
    """Data attributes, with a space before each."""
    return "".join(f' data-{name}="{escape(value)}"' for name, value in facts)


def article(view: str, body: str, *, name: str = "", point: str = "", question: str = "") -> str:
    """One card of a view; with a `name`, one that the script draws charts in."""
    drawn = f' id="{escape(name)}"' if name else ""
    kind = "panel" if name else "plain"
    named = (("view", view), ("point", point), ("question", question))
    facts = [(fact, value) for fact, value in named if value]
    return f'<article class="{kind}"{drawn}{attributes(facts)}>{body}</article>'


def heading(grid: Grid) -> str:
    """A table's title and note."""
    return f"<h3>{escape(grid.title)}</h3>{note(grid.note)}"


def note(text: str) -> str:
    """A sentence in small print; nothing of nothing."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def figure(kind: str, caption: str = "") -> str:
    """The place of one chart."""
    return (
        f'<figure class="{kind}"><figcaption>{escape(caption)}</figcaption>'
        f'<div class="chart"></div></figure>'
    )


def select(name: str, label: str, values: Iterable[str]) -> str:
    """A labelled list to choose one value from."""
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    return f'<label>{escape(label)} <select name="{name}">{options}</select></label>'


def grid_table(grid: Grid) -> str:
    """A table that scrolls sideways where it is too wide, by keyboard too."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in grid.numeric else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in grid.rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(grid.title)}">'
        f"<table><thead><tr>{cells('th', grid.columns)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
