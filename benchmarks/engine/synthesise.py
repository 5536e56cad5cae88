"""Make traces of requests: three kinds of traffic, seeded, with explicit sharing of prefixes.

    python -m benchmarks.engine.synthesise FOLDER [--seed 1]

writes chat.jsonl (short turns behind long prefixes), short.jsonl (short prompts) and long.jsonl
(long documents) in the format of `benchmarks.engine.traces`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.cases import PAGE

__all__ = ["SLICES", "chat", "documents", "main", "short_prompts"]

Line = dict[str, Any]


def chat(seed: int, sessions: int = 12, turns: int = 8) -> Iterator[Line]:
    """Conversations that go on: each turn is short, behind all that was said before.

    What came before the first turn is warmed, for it was computed in earlier turns. One in three
    conversations shares a system prompt.
    """
    random = Random(f"chat {seed}")
    histories: dict[int, list[tuple[str, int]]] = {}
    for session in range(sessions):
        system = [("system", 2048)] if session % 3 == 0 else []
        # Spread evenly over the logarithm, so that every seed has short and long ones.
        length = round(4096 * 7 ** (session / max(sessions - 1, 1))) // PAGE * PAGE
        histories[session] = [*system, (f"history {session}", length)]
        yield _line(histories[session], 1, warm=True)
    for turn in range(turns):
        for session in range(sessions):
            said = (f"turn {session}.{turn}", _log_uniform(random, 16, 512))
            histories[session] = [*histories[session], said]
            answer = _log_uniform(random, 32, 400)
            yield _line(histories[session], answer, session=f"chat {session}")
            # The answer is part of the next prompt; its tokens are not those that were generated.
            histories[session] = [*histories[session], (f"answer {session}.{turn}", answer)]


def short_prompts(seed: int, count: int = 128) -> Iterator[Line]:
    """Prompts of 32 to 2048 tokens, each by itself but for a system prompt that half of them share.

    Two in three are shorter than 700 tokens.
    """
    random = Random(f"short {seed}")
    for i in range(count):
        shared = [("instructions", 512)] if random.random() < 0.5 else []
        length = _log_uniform(random, 32, 2048 - 512 * len(shared))
        yield _line([*shared, (f"prompt {i}", length)], _log_uniform(random, 16, 256))


def documents(seed: int, count: int = 8, questions: int = 2) -> Iterator[Line]:
    """Documents of 8,192 to 32,000 tokens; after each a few questions, behind the cached document.

    A question comes when a few other documents have been read.
    """
    random = Random(f"long {seed}")
    texts = [(f"document {i}", _log_uniform(random, 8192, 31000)) for i in range(count)]
    order = [(i + 3 * turn, i, turn) for i in range(count) for turn in range(questions)]
    for _, i, turn in sorted(order):
        question = (f"question {i}.{turn}", _log_uniform(random, 16, 256))
        yield _line([texts[i], question], _log_uniform(random, 64, 400), session=f"document {i}")


SLICES: dict[str, Callable[[int], Iterator[Line]]] = {
    "chat": chat,
    "short": short_prompts,
    "long": documents,
}


def _line(
    segments: list[tuple[str, int]], output_length: int, *, session: str = "", warm: bool = False
) -> Line:
    line: Line = {
        "segments": [[name, count] for name, count in segments], "output_length": output_length,
    }  # fmt: skip
    if session:
        line["session"] = session
    return line | {"warm": True} if warm else line


def _log_uniform(random: Random, least: int, most: int) -> int:
    return round(exp(random.uniform(log(least), log(most))))


def main(arguments: list[str] | None = None) -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, made in SLICES.items():
        lines = [json.dumps(line) for line in made(options.seed)]
        path = options.folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        print(f"{path}: {len(lines)} requests")


if __name__ == "__main__":
    main()
