"""Text that came out of a database, made safe to show."""

from __future__ import annotations

import re

__all__ = ["plain"]

# What a terminal would obey instead of show: C0 and C1 controls, and bidirectional overrides.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` without the characters that a terminal obeys."""
    return _CONTROL.sub("?", text)
