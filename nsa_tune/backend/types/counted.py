"""Counts in sentences: "1 table", "2 tables"."""

from __future__ import annotations


def counted(count: int, noun: str, many: str = "") -> str:
    """`count` with its `noun`, or with `many`: the noun with an s where it is not given."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"
