"""What the plug-in takes when an engine starts, in seconds, by what it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS: dict[str, float] = {}
"""Of this process's last start; none counts twice."""
ENGINE = "SGLang's own graphs"
"""What is not the plug-in's."""


@contextmanager
def spent(what: str) -> Iterator[None]:
    """Count the seconds within as `what`'s, but for those that something within has counted."""
    begin, counted = time.monotonic(), sum(SECONDS.values())
    try:
        yield
    finally:
        own = time.monotonic() - begin - (sum(SECONDS.values()) - counted)
        SECONDS[what] = SECONDS.get(what, 0.0) + own


def split() -> str:
    """All of it in one line."""
    mine = {what: took_s for what, took_s in SECONDS.items() if what != ENGINE}
    parts = ", ".join(f"{what} {took_s:.1f}" for what, took_s in mine.items())
    return (
        f"the plug-in took {sum(mine.values()):.1f} s of this start ({parts}); "
        f"{ENGINE} took {SECONDS.get(ENGINE, 0.0):.1f} s"
    )
