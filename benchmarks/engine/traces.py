"""Request traces: Mooncake's, and this project's own with explicit sharing of prefixes.

Own format, a JSON object a line:

    {"segments": [["system", 1024], ["user 3", 200]], "output_length": 16, "session": 3}

A prompt is its segments in a row; segments of one name are the same tokens. Requests of one
`session` follow each other. `"warm": true` marks a request that only fills the prefix cache before
the clock starts; its segments stay the same in each replay, all others get other tokens each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Prompts", "Request", "Segment", "read_trace"]

_MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that is the same wherever it has the same name."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    segments: tuple[Segment, ...]
    output_length: int
    session: str = ""
    """Requests of one session run one after the other; an empty one stands alone."""
    warm: bool = False

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return sum(one.tokens for one in self.segments)


class Prompts:
    """The token ids of a trace's requests."""

    def __init__(
        self, requests: Iterable[Request], tokens: Callable[[int, str], list[int]]
    ) -> None:
        self._tokens = tokens
        self._kept = {part.name for one in requests if one.warm for part in one.segments}

    def of(self, request: Request, replay: int) -> list[int]:
        """Token ids for the `replay`-th time; segments that were warmed are always the same."""
        ids: list[int] = []
        for part in request.segments:
            seed = part.name if part.name in self._kept else f"{replay}: {part.name}"
            ids += self._tokens(part.tokens, seed)
        return ids


def read_trace(path: Path, *, most: int, longest: int, out_tokens: int) -> list[Request]:
    """The first `most` requests with prompts of at most `longest` tokens, the warm ones besides.
    ValueError for a line that is of neither format."""
    found: list[Request] = []
    timed = 0
    for line in path.read_text().splitlines():
        if not line.strip() or timed == most:
            continue
        one = _request(json.loads(line), out_tokens)
        if one.input_length <= longest:
            found.append(one)
            timed += not one.warm
    return found


def _request(given: dict[str, Any], out_tokens: int) -> Request:
    if "segments" in given:
        segments = tuple(Segment(str(name), int(count)) for name, count in given["segments"])
    elif "hash_ids" in given:
        segments = _mooncake(given["hash_ids"], given["input_length"])
    else:
        raise ValueError(f"a request needs segments or hash_ids: {sorted(given)}")
    return Request(
        segments, max(1, min(given["output_length"], out_tokens)),
        str(given.get("session", "")), bool(given.get("warm", False)),
    )  # fmt: skip


def _mooncake(blocks: list[int], length: int) -> tuple[Segment, ...]:
    """A segment a block of 512 tokens; the last is cut where the prompt ends."""
    segments = []
    for i, block in enumerate(blocks):
        count = min(_MOONCAKE_BLOCK, length - i * _MOONCAKE_BLOCK)
        if count > 0:
            segments.append(Segment(f"block {block}", count))
    return tuple(segments)
