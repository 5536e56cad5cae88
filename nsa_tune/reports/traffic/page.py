"""A replay as one HTML page: the answer, its tables, and at the end what they rest on."""

from __future__ import annotations

from html import escape

from nsa_tune.reports.html.frame import offline
from nsa_tune.reports.html.markup import article, heading, html_table, note
from nsa_tune.reports.traffic.replay import Replay, tables

_VIEW = "crossovers"
"""The view that the page's script shows first; a replay has no other."""


def as_html(found: Replay) -> str:
    """The page, which needs nothing but itself."""
    title = f"{found.trace} replayed"
    header = (
        f"<header><h1>{escape(title)}</h1><p><strong>{escape(found.headline)}</strong></p>"
        '<form class="filters" hidden></form></header>'
    )
    cards = (article(_VIEW, heading(one) + html_table(one)) for one in tables(found) if one.rows)
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in found.facts.items()
    )
    section = (
        '<section class="table" aria-labelledby="title">\n'
        f'<h2 id="title">What choosing by batch is worth</h2>\n{"".join(cards)}\n'
        f'<details><summary>What this rests on</summary><dl class="card">{facts}</dl>'
        f"{''.join(map(note, found.notes))}</details>\n</section>"
    )
    return offline(None).page(title, header, [section], None)
