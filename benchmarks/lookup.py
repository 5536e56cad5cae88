"""What a plan costs, as ratios to an empty Python call, beside other ways of looking something up.

    python benchmarks/lookup.py [--json]

Each batch is drawn at random and new to the dispatcher, which keeps no plans. A figure is the
median over the batches of the best of several rounds; a shared machine makes single rounds slow.
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter_ns, process_time
from typing import Any, NamedTuple

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import read_text

_GPU = "NVIDIA H100 80GB HBM3"
_KEY: dict[str, Any] = {"model": "deepseek-v3.2", "heads": 128, "kv_dtype": "fp8"}
_BATCHES, _CALLS, _ROUNDS = 200, 50, 28
_MEASUREMENTS = 5000
_KINDS = (("prefill", "extend"), ("indexer_layout", "verify"))


class Figure(NamedTuple):
    """One line of the result."""

    what: str
    microseconds: float
    limit_us: float | None
    """What it is meant to stay under."""


def best_ns(function: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Nanoseconds of a call: the best round for each argument, the median over the arguments."""
    return median(each_ns(function, arguments))


def each_ns(function: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    """Nanoseconds of a call with each argument: the best round. A round goes over all arguments, so
    that a slow moment of the machine does not fall into all rounds of one."""
    best = [inf] * len(arguments)
    for _ in range(_ROUNDS):
        for i, argument in enumerate(arguments):
            start = perf_counter_ns()
            for _ in range(_CALLS):
                function(argument)
            best[i] = min(best[i], (perf_counter_ns() - start) / _CALLS)
    return best


def _empty(argument: object) -> object:
    return argument


def _batches(name: str, dispatcher: Dispatcher) -> list[Batch]:
    random, point = Random(17), POINTS[name]
    return [point.sample(dispatcher.setting, random) for _ in range(_BATCHES)]


def _complete(dispatcher: Dispatcher) -> Dispatcher:
    """The dispatcher with made-up times for every arm that its table has none of."""
    random, policies = Random(23), []
    for policy in dispatcher.policies.values():
        rows = list(policy.rows)
        known = {row.arm for row in rows}
        batches = [policy.point.sample(dispatcher.setting, random) for _ in range(60)]
        for i, one in enumerate(policy.candidates):
            for batch in () if one.name in known else batches:
                # Crossing times, so that the answer is not known beforehand.
                time_us = 5 + 20 / (1 + i) + 0.01 * (1 + i) * batch.q_tokens
                rows.append(
                    Measurement(
                        policy.point.name, str(batch), one.name, Status.OK, time_us, time_us,
                        time_us, 5,
                    )
                )  # fmt: skip
        policies.append(Policy.fit(policy.point, dispatcher.setting, rows))
    return Dispatcher(dispatcher.setting, policies, source="made up", baseline=dispatcher.baseline)


def _planning(dispatcher: Dispatcher) -> Iterator[Figure]:
    yield from _plans_of(dispatcher, "")
    for name, kind in _KINDS:
        batches = _batches(name, dispatcher)
        sums = [batch.sums for batch in batches]
        for question in dispatcher.questions(sums[0].mode):
            chosen = [_chooser(dispatcher, question, batch) for batch in sums]
            times = [best_ns(f, [b]) for f, b in zip(chosen, sums, strict=True)]
            yield Figure(f"{question} alone, {kind}, from sums", median(times) / 1e3, 0.25)
        what = f"whole plan, {kind}, from the lengths of its sequences"
        yield from _usual_and_slow(what, each_ns(dispatcher.plan, batches), 3.0)


def _plans_of(dispatcher: Dispatcher, note: str) -> Iterator[Figure]:
    for name, kind in _KINDS:
        sums = [batch.sums for batch in _batches(name, dispatcher)]
        what = f"whole plan, {kind}, from sums{note}"
        yield from _usual_and_slow(what, each_ns(dispatcher.plan, sums), 1.3)
        if kind == "extend" and not note:
            yield from _dense_or_not(dispatcher, sums)


def _usual_and_slow(what: str, times_ns: list[float], limit_us: float) -> Iterator[Figure]:
    yield Figure(what, median(times_ns) / 1e3, limit_us)
    slow_ns = sorted(times_ns)[len(times_ns) * 9 // 10]
    yield Figure(f"{what}: a tenth takes more than", slow_ns / 1e3, None)


def _dense_or_not(dispatcher: Dispatcher, sums: Sequence[Batch]) -> Iterator[Figure]:
    """Plans are of two kinds: where dense attention is exact every kernel may run."""
    topk = dispatcher.setting.profile.index_topk
    for where, some in (
        ("more than index_topk tokens in a sequence", [b for b in sums if b.max_kv > topk]),
        ("at most as many in each", [b for b in sums if b.max_kv <= topk]),
    ):
        name = f"the same, {where} ({len(some)} of {len(sums)})"
        yield Figure(name, best_ns(dispatcher.plan, some) / 1e3, None)


def _chooser(dispatcher: Dispatcher, name: str, batch: Batch) -> Callable[[Batch], object]:
    return dispatcher.chooser(name, batch.mode)


def _making() -> Iterator[Figure]:
    random = Random(3)
    prefixes = [random.randrange(8192) for _ in range(64)]
    news = [random.randrange(1, 512) for _ in range(64)]
    sequences = best_ns(lambda _: Batch.extend(prefixes, news), [0] * 5) / 1e3
    yield Figure("a batch of 64 sequences from their lengths", sequences, 5.0)
    sums = best_ns(
        lambda _: Batch.from_totals(
            mode="extend", batch_size=8, q_tokens=1024, kv_tokens=9216, max_kv=2048, pairs=999_999
        ),
        [0] * 5,
    )
    yield Figure("a batch from sums", sums / 1e3, None)


def _others(dispatcher: Dispatcher, folder: Path) -> Iterator[Figure]:
    batches = [batch.sums for batch in _batches("prefill", dispatcher)]
    keys = [(b.batch_size, b.q_tokens, b.kv_tokens, b.max_kv) for b in batches]
    plans = dict(zip(keys, batches, strict=True))
    yield Figure("dict, of batches seen before", best_ns(plans.__getitem__, keys) / 1e3, None)
    bounds = [2**k for k in range(32)]
    at = best_ns(partial(bisect_left, bounds), [batch.q_tokens for batch in batches]) / 1e3
    yield Figure("bisect of one sum in 32 bounds", at, None)
    path = folder / "plans.db"
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE plans (n, q, kv, longest, path, PRIMARY KEY (n, q, kv, longest))"
    )
    connection.executemany("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, ?, 'mla')", keys)
    connection.commit()
    query = "SELECT path FROM plans WHERE n = ? AND q = ? AND kv = ? AND longest = ?"
    some = keys[:40]
    found = best_ns(lambda key: connection.execute(query, key).fetchone(), some) / 1e3
    yield Figure("sqlite3, by primary key", found, None)
    try:
        from sqlite_utils import Database
    except ImportError:
        return
    table = Database(path)["plans"]
    yield Figure("sqlite-utils, by primary key", best_ns(table.get, some[:8]) / 1e3, None)  # type: ignore[union-attr]


def _opening(folder: Path) -> Iterator[Figure]:
    """Milliseconds as microseconds: a database of 5,000 measurements, its models fitted or not."""
    from nsa_tune.backend.dispatch.refit import refit
    from nsa_tune.db.exchange import import_text, write_text
    from nsa_tune.db.store import Store

    path, text = folder / "big.db", folder / "big.tsv"
    write_text(_big(), text)
    with Store.open(path) as store:
        import_text(store, text)
    fitting = min(_opened(path) for _ in range(3))
    with Store.open(path) as store:
        for table in store.tables():
            refit(store, table.key)
    fitted = min(_opened(path) for _ in range(25))
    yield Figure(f"opening {_MEASUREMENTS} measurements, fitting the models", fitting, None)
    first = min(_opened_first(path) for _ in range(25))
    yield Figure("opening them with a current stamp, for the first time in a process", first, 5_000)
    yield Figure("opening them with a current stamp, again", fitted, 5_000)
    yield Figure("the first plan of a fresh dispatcher", _first_plan(path), 1_000)


def _first_plan(path: Path) -> float:
    times = []
    for batch in _batches("prefill", Dispatcher.open(path, _GPU, **_KEY))[:20]:
        dispatcher = Dispatcher.open(path, _GPU, **_KEY)
        start = perf_counter_ns()
        dispatcher.plan(batch.sums)
        times.append((perf_counter_ns() - start) / 1e3)
    return median(times)


def _opened(path: Path) -> float:
    # Of this process alone: what others do on the machine says nothing.
    start = process_time()
    Dispatcher.open(path, _GPU, **_KEY)
    return (process_time() - start) * 1e6


def _opened_first(path: Path) -> float:
    """The same in a new process, as an engine opens a table; without the time of its imports."""
    command = [sys.executable, __file__, "--open", str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _big() -> Table:
    """The shipped table, continued as a sweep does: batches of equal sequences, random sizes."""
    (path,) = (path for path in shipped() if path.stem == "h100-80gb-hbm3_deepseek-v3.2_h128_fp8")
    table = read_text(path)
    dispatcher = Dispatcher.open(path, _GPU, **_KEY)
    rows = list(table.measurements)
    known = {(row.point, row.batch, row.arm) for row in rows}
    for row in _made_up(dispatcher):
        if len(rows) >= _MEASUREMENTS:
            break
        place = (row.point, row.batch, row.arm)
        if place not in known:
            known.add(place)
            rows.append(row)
    return replace(table, measurements=tuple(rows))


def _made_up(dispatcher: Dispatcher) -> Iterable[Measurement]:
    random = Random(5)
    example = dispatcher.policies["prefill"].rows[0]
    while True:
        for name, policy in dispatcher.policies.items():
            batch = _equal(POINTS[name].sample(dispatcher.setting, random))
            for arm, one in policy.estimates(batch).items():
                yield replace(
                    example, point=name, batch=str(batch), arm=arm, latency_us=one.latency_us,
                    low_us=one.latency_us * 0.995, high_us=one.latency_us * 1.005,
                )  # fmt: skip


def _equal(batch: Batch) -> Batch:
    """The batch with all its sequences like the first."""
    assert batch.lens is not None
    prefix, new = batch.lens[0]
    count = min(len(batch.lens), 2**24 // (prefix + new))
    if batch.mode is Mode.EXTEND:
        return Batch.extend([prefix] * count, [new] * count)
    return Batch.verify([prefix + new] * count, new)


def figures() -> list[Figure]:
    """Every line of the result; the empty call first."""
    dispatcher = Dispatcher.open(gpu=_GPU, **_KEY)
    with tempfile.TemporaryDirectory() as folder:
        return [
            Figure("an empty call", best_ns(_empty, [0] * 50) / 1e3, None),
            *_planning(dispatcher),
            *_plans_of(_complete(dispatcher), ", times for every arm of every point"),
            *_making(),
            *_others(dispatcher, Path(folder)),
            *_opening(Path(folder)),
        ]


def main() -> None:
    """Print the figures, as a table or as JSON."""
    parser = argparse.ArgumentParser(description="What a plan costs, in empty calls.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", type=Path, help="print the time of opening this database once")
    arguments = parser.parse_args()
    if arguments.open:
        print(_opened(arguments.open))
        return
    found = figures()
    floor = found[0].microseconds
    cpu, python = detect.cpu_name(), platform.python_version()
    if arguments.json:
        rows = [{**one._asdict(), "ratio": one.microseconds / floor} for one in found]
        document = {"schema": "nsa-tune/lookup-cost/1", "cpu": cpu, "python": python, "rows": rows}
        json.dump(document, sys.stdout)
        return
    print(f"{cpu}, Python {python}")
    print("| what | empty calls | us | meant to stay under |")
    print("|---|---|---|---|")
    for one in found:
        limit = "" if one.limit_us is None else f"{one.limit_us:,g} us"
        calls, time_us = _shown(one.microseconds / floor), _shown(one.microseconds)
        print(f"| {one.what} | {calls} | {time_us} | {limit} |")


def _shown(number: float) -> str:
    """Three digits, or whole thousands."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


if __name__ == "__main__":
    main()
