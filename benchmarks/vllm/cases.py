"""The batches that are measured: a cached prefix and new tokens, for some sequences."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK", "CASES", "Case", "cases_of"]

BLOCK = 64
"""Tokens in a block of vLLM's KV cache: only whole blocks are found again."""


@dataclass(frozen=True, slots=True)
class Case:
    """One batch of equal sequences."""

    prefix: int
    """Tokens of each sequence that are in the KV cache."""
    new: int
    sequences: int = 1

    def __str__(self) -> str:
        return f"{self.prefix}+{self.new} x{self.sequences}"

    @property
    def tokens(self) -> int:
        """What the batch computes."""
        return self.new * self.sequences


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
    """The cases of prefix:new:sequences,...; the built-in ones for an empty `text`.

    Raises:
        ValueError: for anything else, and for a prefix that is not of whole blocks.
    """
    if not text:
        return CASES
    found = []
    for one in text.split(","):
        try:
            case = Case(*map(int, one.split(":")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a case is prefix:new:sequences, not {one!r}") from error
        if case.prefix % BLOCK or case.prefix < 0 or case.new < 1 or case.sequences < 1:
            raise ValueError(
                f"{one!r} cannot be run: the prefix must be a multiple of {BLOCK}, "
                "the rest at least 1"
            )
        found.append(case)
    return tuple(found)
