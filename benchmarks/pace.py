"""How many measurements a second each of two runs of the same grid made.

    nsa-tune run --device cuda:0 --target-regret 0 --db one.db --events one.jsonl
    nsa-tune run --device all --target-regret 0 --db all.db --events all.jsonl
    python -m benchmarks.pace one.jsonl all.jsonl [--after 0,100,200]

Both take the batches in the same order, so that what was done after the first N of them is the same
work: a run that compiled kernels on its first batches is told from one that did not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def batches_of(path: Path) -> list[tuple[float, int]]:
    """(seconds since the start, measurements) of each batch that a run reported."""
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(one["seconds"], len(one["rows"])) for one in events if one["event"] == "batch"]


def pace(batches: list[tuple[float, int]], after: int) -> float:
    """Measurements a second behind the first `after` batches."""
    start = batches[after - 1][0] if after else 0.0
    return sum(rows for _, rows in batches[after:]) / (batches[-1][0] - start)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Measurements a second of two runs.")
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--after", default="0,100,200", help="batches, comma-separated")
    arguments = parser.parse_args()
    one, other = batches_of(arguments.one), batches_of(arguments.other)
    print("| after batches | one, 1/s | other, 1/s | ratio |")
    print("|---|---|---|---|")
    for after in map(int, arguments.after.split(",")):
        first, second = pace(one, after), pace(other, after)
        print(f"| {after} | {first:.1f} | {second:.1f} | {second / first:.2f} |")


if __name__ == "__main__":
    main()
