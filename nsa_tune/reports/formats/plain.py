"""Text without control characters."""

from __future__ import annotations

import re

# C0 and C1 controls, and bidirectional overrides.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` with each control character replaced by "?".

    Texts out of a database may be hostile, and a terminal would obey an escape sequence.
    """
    return _CONTROL.sub("?", text)


def source_name(source: str) -> str:
    """A table's source without its directories, which a report that is sent on should not tell."""
    return source.rpartition("/")[2] or source
