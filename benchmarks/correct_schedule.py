"""Take FlashMLA's schedule out of every layer's time, in tables of the protocol cuda-graph/1.

    python benchmarks/correct_schedule.py OLD... --by nsa_tune/tables/h200_{model}_h{heads}_fp8.tsv

That protocol timed the schedule in each layer. It depends on the rows of a batch and on the number
of SMs alone, and is measured apart since cuda-graph/2: a table of that protocol, of a GPU with as
many SMs, says what to take away. Each corrected row says so in its reason.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from nsa_tune.backend.dispatch.refit import write_fitted
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.exchange import write_text
from nsa_tune.db.text_table import read_stored_text, read_text

_ARMS = frozenset({"flashmla_kv", "mla/flashmla_kv", "with_kvcache"})

_LEAST_US = 0.1
"""Microseconds: the least lower end of an interval. Where a sample was disturbed, the interval
begins below the schedule's own time."""


def schedule_of(table: Table) -> Callable[[int], float]:
    """Microseconds of a schedule by rows: straight lines between those that `table` has."""
    by_rows: dict[int, list[float]] = defaultdict(list)
    for row in table.measurements:
        if row.arm in _ARMS and row.pass_us is not None:
            by_rows[Batch.parse(row.batch).q_tokens].append(row.pass_us)
    rows = sorted(by_rows)
    times = [median(by_rows[count]) for count in rows]

    def at(count: int) -> float:
        i = min(max(bisect(rows, count) - 1, 0), len(rows) - 2)
        part = (count - rows[i]) / (rows[i + 1] - rows[i])
        return times[i] + min(max(part, 0.0), 1.0) * (times[i + 1] - times[i])

    return at


def corrected(row: Measurement, schedule: Callable[[int], float], source: str) -> Measurement:
    """`row` with the schedule apart, if its arm has one."""
    if row.arm not in _ARMS or row.status is not Status.OK or row.latency_us is None:
        return row
    shared = schedule(Batch.parse(row.batch).q_tokens)
    assert row.latency_us > shared, f"{row.batch}: the schedule takes as long as the kernel"
    low, high = row.low_us or row.latency_us, row.high_us or row.latency_us
    return replace(
        row,
        latency_us=row.latency_us - shared,
        low_us=max(low - shared, _LEAST_US),
        high_us=high - shared,
        pass_us=shared,
        reason=f"the schedule's time is that of {source}",
    )


def main() -> None:
    """Correct tables in place."""
    parser = argparse.ArgumentParser(description="Take FlashMLA's schedule out of a layer's time.")
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--by", required=True, help="a table; {model}, {heads}: those of OLD")
    arguments = parser.parse_args()
    for path in arguments.tables:
        table = read_text(path)
        if table.key.protocol != "cuda-graph/1":
            print(f"{path} is left: {table.key.protocol}")
            continue
        by = read_text(Path(arguments.by.format(model=table.key.model, heads=table.key.heads)))
        assert by.device.sms == table.device.sms, "a schedule is made for a number of SMs"
        schedule = schedule_of(by)
        rows = tuple(corrected(row, schedule, by.key.gpu) for row in table.measurements)
        key = replace(table.key, protocol="cuda-graph/2")
        fitted = read_stored_text(path).weights is not None
        write = write_fitted if fitted else write_text
        write(replace(table, key=key, measurements=rows), path)
        print(f"{path}: {sum(map(bool, (row.reason for row in rows)))} rows corrected")


if __name__ == "__main__":
    main()
