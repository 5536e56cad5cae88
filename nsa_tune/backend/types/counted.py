"""Counts in sentences: "1 table", "2 tables"."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`count` with its noun: `one`, or `many`, which is `one` with an s where it is not given."""
    return f"{count} {one if count == 1 else many or one + 's'}"
