"""Proof that a change of the code changes no plan: answers recorded before it and after it.

    python benchmarks/same_plans.py record OUT.jsonl.gz [--batches 20000]
    python benchmarks/same_plans.py compare BEFORE AFTER

`record` asks the nsa_tune that is importable (PYTHONPATH says which, for a Python that has none
installed), for every table that ships with it, about the same random batches each time: the plan,
and for each tenth batch what `decide` says of each question. Then come the plans of captured sizes,
and of replays of these. 20,000 batches a table take some ten minutes of one core.

`compare` also says what other choices cost, by the times that the importable nsa_tune interpolates
between measured ones. It ends with 1 if anything differs.

Only public names are used, so that the code may move as it likes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import cycle, islice, zip_longest
from math import exp, isclose, log
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import nsa_tune
from nsa_tune import Batch, Dispatcher, Plan

_EXTREME = 0.03
_DECIDED = 10
"""`decide` takes twenty times as long as a plan: one batch in so many is asked about."""
_REPLAYS = 16
_SIZES = (
    (1, 1), (8, 1), (64, 1), (256, 1), (512, 1), (1, 2), (16, 2), (4, 3), (128, 4), (32, 5),
    (256, 6), (16384, 4),
)  # fmt: skip
"""Captured sizes: sequences and their new tokens."""
_DENSE, _LONGEST, _MOST_TOKENS = 2048, 2**19, 2**31 - 1
_PACKAGE = Path(nsa_tune.__file__).parent
_EXAMPLES = 5
_KINDS = {"verdict": "verdict", "tied": "verdict", "forbidden": "limit", "estimates": "estimate"}
"""Kinds of difference by field of a decision; all others are choices."""

T = TypeVar("T")


# --- batches


def batch_of(table: str, number: int) -> Batch:
    """The batch with this number for `table`: always the same."""
    random = Random(f"{table} {number}")
    extreme = random.random() < _EXTREME
    if random.random() < 0.6:
        batch = _many_rows(random) if extreme else _extend(random)
    else:
        next_n = random.randint(1, 6)
        rows = _spread(random, 20_000, 200_000) if extreme else 0
        batch = _step(random, rows // next_n or _spread(random, 1, 512), next_n)
    return batch if random.random() < 0.5 else _sums(random, batch)


def _extend(random: Random) -> Batch:
    count = _spread(random, 1, 64)
    longest = random.choice((_DENSE, max(_LONGEST // count, 2)))
    most = min(longest, max(16384 // count, 1))
    return _extended(random, count, longest, lambda: _spread(random, 1, most))


def _many_rows(random: Random) -> Batch:
    """So many rows, or kv tokens, that hard limits count."""
    rows = _spread(random, 20_000, random.choice((70_000, 70_000, 2_000_000)))
    longest = random.choice((_DENSE, _LONGEST))
    count = max(_spread(random, 1, 4096), -(-rows // longest))
    return _extended(random, count, min(longest, _MOST_TOKENS // count), lambda: rows // count)


def _extended(random: Random, count: int, longest: int, new: Callable[[], int]) -> Batch:
    prefixed = random.choice((0.0, 0.5, 1.0))

    def sequence() -> tuple[int, int]:
        added = new()
        cold = random.random() >= prefixed or added == longest
        return 0 if cold else _spread(random, 1, longest - added), added

    prefixes, news = zip(*_lengths(random, count, sequence), strict=True)
    return Batch.extend(prefixes, news, captured=random.random() < 0.125)


def _step(random: Random, count: int, next_n: int, *, captured: bool = False) -> Batch:
    longest = min(random.choice((_DENSE, 2**17, _LONGEST)), _MOST_TOKENS // count)
    contexts = _lengths(random, count, lambda: _spread(random, next_n, longest))
    if next_n == 1 and random.random() < 0.6:
        return Batch.decode(contexts, captured=captured)
    make = random.choice((Batch.verify, Batch.draft_extend))
    return make(contexts, next_n, captured=captured)


def _sums(random: Random, batch: Batch) -> Batch:
    """The batch as an engine gives it that knows only sums."""
    return Batch.from_totals(
        mode=batch.mode,
        q_tokens=batch.q_tokens,
        kv_tokens=batch.kv_tokens,
        max_kv=batch.max_kv,
        pairs=random.choice((batch.pairs, None)),
        captured=batch.captured,
        batch_size=batch.batch_size,
    )


def _lengths(random: Random, count: int, one: Callable[[], T]) -> list[T]:
    """`count` sequences: half of the time all are equal, else they are of up to 64 kinds."""
    kinds = min(count, 64) if random.random() < 0.5 else 1
    return [*islice(cycle([one() for _ in range(kinds)]), count)]


def _spread(random: Random, low: int, high: int) -> int:
    """A whole number of `low` to `high`, spread evenly in octaves."""
    return min(round(exp(random.uniform(log(low), log(high)))), high)


def _words(batch: Batch) -> str:
    lens = "sums" if batch.lens is None else "lens"
    return (
        f"{batch.mode}{' captured' * batch.captured} {lens} n={batch.batch_size} "
        f"q={batch.q_tokens} kv={batch.kv_tokens} max={batch.max_kv} pairs={batch.pairs} "
        f"next_n={batch.next_n}"
    )


# --- recording


def record(out: Path, batches: int) -> None:
    """Write what every shipped table answers, one line for each batch."""
    forcing = [name for name in os.environ if name.startswith("NSA_TUNE_")]
    if forcing:
        sys.exit(f"unset {', '.join(forcing)}: that changes plans")
    print(f"asking {_PACKAGE}")
    # Without a name and a time, so that equal answers are equal files.
    with (
        out.open("wb") as file,
        gzip.GzipFile("", "wb", 1, file, mtime=0) as packed,
        io.TextIOWrapper(packed, "utf-8") as text,
    ):
        for path in sorted(_PACKAGE.glob("tables/*.tsv")):
            start = perf_counter()
            for line in _answers(path, batches):
                text.write(json.dumps(line, separators=(",", ":")) + "\n")
            print(f"{path.stem}: {perf_counter() - start:.1f} s", flush=True)


def _answers(path: Path, batches: int) -> Iterator[dict[str, Any]]:
    table, dispatcher = path.stem, _opened(path)
    for number in range(batches):
        batch = batch_of(table, number)
        names = () if number % _DECIDED else dispatcher.questions(batch.mode)
        yield {
            "key": f"{table} {number} {_words(batch)}",
            "plan": _fields(dispatcher.plan(batch)),
            "decide": {name: _decided(dispatcher, batch, name) for name in names},
        }
    for count, next_n in _SIZES:
        plan = dispatcher.captured(count, next_n)
        size = f"{count}x{next_n}"
        yield {"key": f"{table} captured {size}", "plan": _fields(plan)}
        for number in range(_REPLAYS):
            random = Random(f"{table} {size} {number}")
            batch = _step(random, count, next_n, captured=True)
            key = f"{table} replay {size} {number} {_words(batch)}"
            yield {"key": key, "plan": _fields(dispatcher.plan(batch))}


def _opened(path: Path) -> Dispatcher:
    head: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            break
        name, _, value = line[2:].partition(" = ")
        head[name] = value
    kv_dtype = "bf16" if head["kv_layout"] == "bf16" else "fp8"
    heads = int(head["heads"])
    return Dispatcher.open(path, head["gpu"], model=head["model"], heads=heads, kv_dtype=kv_dtype)


def _fields(plan: Plan) -> dict[str, Any]:
    """The decisions of a plan; those that are None are left out."""
    names = [one.name for one in fields(plan) if one.name != "batch" and one.name[0] != "_"]
    return {name: value for name in names if (value := getattr(plan, name)) is not None}


def _decided(dispatcher: Dispatcher, batch: Batch, name: str) -> dict[str, Any]:
    one = dispatcher.decide(batch, name)
    return {
        "choice": one.choice,
        "default": one.default,
        "arms": dict(one.arms),
        "verdict": str(one.verdict),
        "tied": [*one.tied],
        "forbidden": dict(one.forbidden),
        "estimates": {
            choice: [time.latency_us, time.low_us, time.high_us]
            for choice, time in one.estimates.items()
        },
    }


# --- comparing


def compare(before: Path, after: Path) -> bool:
    """Print how the answers differ; whether they do not."""
    counts: Counter[str] = Counter()
    examples: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    differences: Counter[tuple[str, str]] = Counter()
    changed: defaultdict[str, list[_Change]] = defaultdict(list)
    for other, line in zip_longest(_lines(before), _lines(after)):
        key, key_before = (json.loads(text or '{"key": ""}')["key"] for text in (line, other))
        if key != key_before:
            sys.exit(f"the files are not of the same batches: {key_before!r} and {key!r}")
        table = key.split()[0]
        counts[table] += 1
        if other == line:
            continue
        answers = json.loads(other), json.loads(line)
        changed[table] += _changes(key, *(answer["plan"] for answer in answers))
        for kind, what in _differences(*answers):
            differences[table, kind] += 1
            if len(examples[table, kind]) < _EXAMPLES:
                examples[table, kind].append(f"{key}: {what}")
    for (table, kind), texts in sorted(examples.items()):
        print(f"{table}: {kind}: {differences[table, kind]} differences")
        for text in texts:
            print(f"    {text}")
    _print_costs(changed, counts)
    print(f"{counts.total()} answers of {len(counts)} tables: {differences.total()} differences")
    return not differences and counts.total() > 0


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from file


class _Change(NamedTuple):
    """Another answer to a question about the batch with this number."""

    number: int
    question: str
    before: str
    after: str


def _changes(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_Change]:
    """The questions of one line that were answered in another way; none of a captured size's."""
    number = key.split()[1]
    if not number.isdecimal():
        return []
    return [
        _Change(int(number), name, before[name], after[name])
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    ]


def _print_costs(changed: Mapping[str, Sequence[_Change]], counts: Mapping[str, int]) -> None:
    """One row a table and question: the share of other answers, how many of these are within what
    was measured, and by how much those are slower (mean and worst), relatively."""
    print("| table | question | changed | measured there | mean | worst |")
    print("|---|---|---|---|---|---|")
    for table, changes in sorted(changed.items()):
        dispatcher = _opened(_PACKAGE / "tables" / f"{table}.tsv")
        costs: defaultdict[str, list[float]] = defaultdict(list)
        for number, question, before, after in changes:
            batch = batch_of(table, number)
            if question in dispatcher.questions(batch.mode):
                times = dispatcher.decide(batch, question).estimates
                pair = [times[choice] for choice in (before, after) if choice in times]
                if len(pair) == 2 and not any(time.extrapolated for time in pair):
                    costs[question].append(pair[1].latency_us / pair[0].latency_us - 1)
        for question, number in sorted(Counter(change.question for change in changes).items()):
            losses = costs[question] or [0.0]
            print(
                f"| {table} | {question} | {number / counts[table]:.2%} | {len(costs[question])} "
                f"| {sum(losses) / len(losses):.2%} | {max(losses):.2%} |"
            )


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and words of each field that differs."""
    one, other = _flat(before), _flat(after)
    for place in dict.fromkeys([*one, *other]):
        a, b = one.get(place), other.get(place)
        kind = _KINDS.get(place[-1], "choice")
        if a != b and not (kind == "estimate" and _alike(a, b)):
            yield kind, f"{' '.join(place)}: {a!r} -> {b!r}"


def _flat(line: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {("plan", k): v for k, v in line["plan"].items()}
    for name, decision in line.get("decide", {}).items():
        flat |= {("decide", name, k): v for k, v in decision.items()}
    return flat


def _alike(
    before: Mapping[str, Sequence[float]] | None, after: Mapping[str, Sequence[float]] | None
) -> bool:
    """Whether the same choices have the same estimates, but for rounding."""
    if before is None or after is None or before.keys() != after.keys():
        return False
    return all(
        isclose(a, b)
        for choice in before
        for a, b in zip(before[choice], after[choice], strict=True)
    )


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description="Proof that a change of code changes no plan.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("files", type=Path, nargs="+", help="OUT, or BEFORE and AFTER")
    parser.add_argument("--batches", type=int, default=20_000, help="recorded of each table")
    arguments = parser.parse_args()
    if len(arguments.files) != (1 if arguments.action == "record" else 2):
        parser.error("record takes one file, compare takes two")
    if arguments.action == "record":
        record(arguments.files[0], arguments.batches)
        return 0
    return 0 if compare(arguments.files[0], arguments.files[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
