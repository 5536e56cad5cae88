"""The prefill batches that are measured: a grid, or batches with lengths of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GRID", "PAGE", "STATE_CASES", "Case", "cases_of", "decode_batches_of", "ragged_cases"]

PAGE = 64
"""The radix cache keeps whole pages of this many tokens."""

GRID = (
    "0:256:1 0:1024:1 0:2048:1 0:4096:1 0:8192:1 "
    "512:64:1 1024:128:1 1920:64:1 1920:128:1 1024:1024:1 "
    "4096:64:1 4096:512:1 8192:128:1 8192:1024:1 8192:2048:1 "
    "30720:64:1 30720:512:1 30720:2048:1 30720:8192:1 65536:1024:1 "
    "0:256:16 0:512:16 0:1024:8 0:2048:4 "
    "1024:512:4 1792:128:16 1792:128:32 4096:64:16 8192:256:16"
)
"""prefix:new:sequences."""

STATE_CASES = "0:3:1 0:64:1 64:1:1 512:61:1 1920:128:1 0:130:5 4096:30:4 8192:515:1 30720:66:1"
"""The same for outputs: also few tokens, and numbers that fill no request of a verify graph."""


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: the lengths of each sequence's cached prefix and of its new tokens."""

    prefix: tuple[int, ...]
    new: tuple[int, ...]
    repeats: float | None = None
    """Share of tokens that repeat the one before; keys are selected by content then."""
    only: str = ""
    """Names of the configurations to run; all of the run's for an empty text."""

    def __post_init__(self) -> None:
        if len(self.prefix) != len(self.new) or not self.new:
            raise ValueError(f"a batch needs as many prefixes as new lengths: {self}")
        if min(self.new) < 1 or min(self.prefix) < 0:
            raise ValueError(f"each sequence needs a new token: {self}")
        if any(length % PAGE for length in self.prefix):
            raise ValueError(f"the cache keeps whole pages of {PAGE} tokens: {self.prefix}")

    @property
    def name(self) -> str:
        """As docs write it: `8192+128 x4`, or a summary of different lengths."""
        count = len(self.new)
        said = "" if self.repeats is None else f", {self.repeats:g} repeat"
        if len(set(zip(self.prefix, self.new, strict=True))) == 1:
            return f"{self.prefix[0]}+{self.new[0]} x{count}{said}"
        return f"ragged {sum(self.prefix)}+{sum(self.new)} x{count}{said}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, cached and new."""
        return sum(self.prefix) + sum(self.new)


def cases_of(text: str) -> list[Case]:
    """Cases from `prefix:new:sequences[:repeats]`, separated by commas or blanks; ValueError for
    anything else."""
    found = []
    for one in text.replace(",", " ").split():
        prefix, new, count, *share = one.split(":")
        cached, fresh = ((int(length),) * int(count) for length in (prefix, new))
        found.append(Case(cached, fresh, float(share[0]) if share else None))
    return found


def ragged_cases(lines: Iterable[str]) -> list[Case]:
    """Cases from lines of JSON such as `{"prefix": [0, 512], "new": [300, 64]}`."""
    given = (json.loads(line) for line in lines if line.strip())
    return [
        Case(tuple(one["prefix"]), tuple(one["new"]), one.get("repeats"), one.get("only", ""))
        for one in given
    ]


def decode_batches_of(text: str, context: int) -> list[tuple[int, int]]:
    """(sequences, context) from `1,8,128:2048`; `context` where none is given."""
    found = []
    for one in text.replace(",", " ").split():
        count, _, length = one.partition(":")
        found.append((int(count), int(length or context)))
    return found
