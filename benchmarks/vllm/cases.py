"""The batches that are measured: equal extends, with decodes beside them or without."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK", "CASES", "Case", "cases_of"]

BLOCK = 64
"""Tokens in a block of vLLM's KV cache: only whole blocks are found again."""


DECODE_PREFIX = 1024
"""Tokens before each decode: a request with one new token."""


@dataclass(frozen=True, slots=True)
class Case:
    """One batch."""

    prefix: int
    """Tokens of each sequence that are in the KV cache."""
    new: int
    sequences: int = 1
    decodes: int = 0

    def __str__(self) -> str:
        beside = f", {self.decodes} decodes" if self.decodes else ""
        return f"{self.prefix}+{self.new} x{self.sequences}{beside}"

    @property
    def lens(self) -> list[tuple[int, int]]:
        """Cached and new tokens of each request."""
        return [(self.prefix, self.new)] * self.sequences + [(DECODE_PREFIX, 1)] * self.decodes


CASES = (
    # More context than index_topk: below 32 heads vLLM sends all through the decode kernel.
    Case(8192, 2048),
    Case(30720, 8192),
    Case(0, 8192),
    Case(30720, 512),
    # Short extends: a threshold on new tokens alone says whether they are decodes.
    Case(0, 200, 4),
    Case(1920, 64, 4),
    Case(8192, 128),
    Case(30720, 64),
    # vLLM takes MHA for it by itself.
    Case(0, 1024, 4),
)


def cases_of(text: str) -> tuple[Case, ...]:
    """The cases of prefix:new:sequences:decodes,...; the built-in ones for an empty `text`.
    ValueError for anything else, and for a prefix that is not of whole blocks."""
    if not text:
        return CASES
    found = []
    for one in text.split(","):
        try:
            case = Case(*map(int, one.split(":")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a case is prefix:new:sequences:decodes, not {one!r}") from error
        if (
            case.prefix % BLOCK
            or min(case.prefix, case.new - 1, case.sequences - 1, case.decodes) < 0
        ):
            raise ValueError(
                f"{one!r} cannot be run: the prefix must be a multiple of {BLOCK}, "
                "the rest at least 1"
            )
        found.append(case)
    return tuple(found)
