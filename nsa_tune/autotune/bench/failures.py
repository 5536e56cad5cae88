"""Why arms failed, as their rows say it."""

from __future__ import annotations

from nsa_tune.backend.types.records import Measurement, Status

_OUT_OF_MEMORY = (
    "memoryerror:",
    "outofmemoryerror:",
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
)
_LONGEST = 300
"""Characters of a reason."""


def reason_of(failure: Exception) -> str:
    """The type and the text of `failure` in one line of at most 300 characters."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:_LONGEST]


def out_of_memory(row: Measurement) -> bool:
    """Whether `row` failed because memory ran out: it may succeed once others hold less of it."""
    text = row.reason.lower()
    return row.status is Status.FAILED and any(words in text for words in _OUT_OF_MEMORY)
