"""What every page has around its tables and charts.

The Content-Security-Policy of a page that is a file allows its own scripts and style, by their
hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from html import escape

from nsa_tune.reports.charts.theme import THEMES
from nsa_tune.reports.html.cards import Panels
from nsa_tune.reports.html.markup import asset, packed_text
from nsa_tune.reports.html.vega_bundle import charts_javascript, has_charts

_CREDITS = (
    '<footer class="note">Charts by Vega, Vega-Lite and Vega-Embed, copyright University of '
    "Washington Interactive Data Lab and contributors, BSD-3-Clause licence.</footer>"
)
_ASSETS = {
    "page.css": "text/css", "page.js": "text/javascript", "live.css": "text/css",
    "live.js": "text/javascript",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """The parts of a page that differ between a file and the dashboard: style and scripts."""

    head: str
    """Elements for the head."""
    end: str
    """Elements behind the page's data."""
    has_charts: bool
    extra: str = ""
    """An element above the tables."""
    after: str = ""
    """An element behind the tables."""

    def page(self, title: str, header: str, sections: Iterable[str], panels: Panels | None) -> str:
        """The whole page; `panels` are its charts, if it has any."""
        data = ""
        if panels is not None:
            every = {"themes": THEMES, "panels": panels}
            data = json.dumps(every, separators=(",", ":"))
        body = "\n".join([*sections, self.after])
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
{self.head}
</head>
<body>
<a class="skip" href="#main">Skip to the tables</a>
{header}
<main id="main">
{body}
</main>
{_CREDITS if self.has_charts else ""}
{packed_text("nsa-tune-data", data)}
{self.end}
</body>
</html>
"""


def linked(to_assets: str, *more: str) -> Frame:
    """The frame of a page on a server, whose assets are below `to_assets`; `more` are the names of
    assets that it loads besides the usual ones."""
    names = ("page.css", *("charts.js",) * has_charts(), "page.js", *more)
    links = [f'<link rel="stylesheet" href="{to_assets}{n}">' for n in names if n.endswith("css")]
    scripts = [f'<script src="{to_assets}{name}"></script>' for name in names if name[-2:] == "js"]
    return Frame(head="\n".join(links), end="\n".join(scripts), has_charts=has_charts())


def offline(javascript: str | None) -> Frame:
    """The frame of a file, with style and scripts in it; nothing else may be loaded.

    The charts' script is deflated to a third. The policy has the hash of what it inflates to.
    """
    style, script = asset("page.css"), asset("page.js")
    scripts = [script] if javascript is None else [script, javascript]
    charts_script = "" if javascript is None else packed_text("nsa-tune-charts", javascript)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return Frame(
        head=f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        f"<style>{style}</style>",
        end=f"{charts_script}<script>{script}</script>",
        has_charts=javascript is not None,
    )


def served_asset(name: str) -> tuple[Callable[[], str], str] | None:
    """What gives the text of a file that linked pages load, and its type; None for another name,
    and for charts.js where vl-convert is not installed."""
    if name == "charts.js":
        return (charts_javascript, "text/javascript") if has_charts() else None
    if name not in _ASSETS:
        return None
    return partial(asset, name), _ASSETS[name]


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
