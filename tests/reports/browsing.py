"""A real browser for tests of pages: offline, and with ears for every complaint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run",
]  # fmt: skip
Scheme = Literal["light", "dark"]
# A page is replaced 8 s after the last time at the earliest, which a test need not wait for.
_HURRY = "LEAST_BETWEEN_PAGES_MS = 8000", "LEAST_BETWEEN_PAGES_MS = 0"


def centre(element: Locator) -> tuple[float, float]:
    """Where the mouse goes; a number or a hatch may lie over the element."""
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


class Visit:
    """One page in a context of its own, and what it complained of."""

    def __init__(
        self, browser: Browser, where: Path | str, scheme: Scheme = "light", width: int = 1280
    ) -> None:
        self.context = browser.new_context(
            offline=isinstance(where, Path), color_scheme=scheme,
            viewport={"width": width, "height": 1000},
        )  # fmt: skip
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = where.as_uri() if isinstance(where, Path) else where

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def hurry(self) -> None:
        """Make a dashboard's page follow its database at once."""
        self.page.route("**/live.js", _hurried)

    def open(self, hash_text: str = "") -> Page:
        """The page, when the charts in view are drawn."""
        self.page.goto(self.url + hash_text)
        self.page.wait_for_selector("article.panel[data-drawn]")
        return self.page

    def drawn(self, panel: str) -> Locator:
        """Bring a panel into view and wait for its charts."""
        place = self.page.locator(f"#{panel}")
        place.scroll_into_view_if_needed()
        for folded in place.locator("details:not([open]) summary").all():
            folded.click()
        self.page.wait_for_selector(f"#{panel}[data-drawn] .chart svg")
        return place

    def view(self, name: str) -> None:
        """Go to a view by its button."""
        self.page.locator(f"nav.views button[data-view={name}]").click()


def _hurried(route: Route) -> None:
    fetched = route.fetch()
    text = fetched.text()
    assert _HURRY[0] in text
    route.fulfill(response=fetched, body=text.replace(*_HURRY))
