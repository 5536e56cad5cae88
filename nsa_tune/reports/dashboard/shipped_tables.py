"""The tables that ship with nsa-tune, as links to a report of each."""

from __future__ import annotations

from functools import cache
from html import escape
from itertools import groupby

from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_key, read_text
from nsa_tune.reports.analysis.report import Report, build

BACK = '<p><a href=".">All tables</a></p>'
"""The way back from the page of one table."""


@cache
def _keys() -> dict[str, Key]:
    """Keys by the tables' names, those of one GPU together."""
    keys = {path.stem: read_key(path) for path in shipped()}
    return dict(sorted(keys.items(), key=lambda item: (item[1].gpu, item[1].model, item[1].heads)))


def shipped_report(name: str) -> Report | None:
    """The report of the table called `name`; None where none is."""
    if name not in _keys():
        return None
    return build(read_text(path) for path in shipped() if path.stem == name)


def listing(*, folded: bool) -> str:
    """Every table by GPU; `folded` where the page has tables of its own."""
    groups = (
        f"<h3>{escape(gpu)}</h3><ul>{''.join(_item(name, key) for name, key in members)}</ul>"
        for gpu, members in groupby(_keys().items(), key=lambda item: item[1].gpu)
    )
    title = f"{counted(len(_keys()), 'table')} that ship with nsa-tune"
    is_open = "" if folded else " open"
    return (
        f'<section class="shipped"><details class="card"{is_open}><summary>{title}</summary>'
        f"{''.join(groups)}</details></section>"
    )


def _item(name: str, key: Key) -> str:
    words = f"{key.model}, {counted(key.heads, 'local head')}, {key.kv_layout}"
    return f'<li><a href="?table={escape(name)}">{escape(words)}</a></li>'
