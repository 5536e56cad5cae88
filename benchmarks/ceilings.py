"""Measure what this device reaches, copy bandwidth and matrix rate, for the roofline of a report.

python -m benchmarks.ceilings nsa-tune.db   adds it to every table of this device in a database

`nsa-tune run` over every point does so itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.ceilings import measure_ceilings
from nsa_tune.autotune.bench.timing import timer_for
from nsa_tune.backend.types.records import Status
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.reports.analysis.roofline import ceilings_of


def main(database: Path) -> None:
    """Measure, print the ceilings, and store them under each key of `database` that fits."""
    device = devices.pick_device("auto")
    described = devices.describe(device)
    rows = measure_ceilings(described.arch, device, timer_for(device))
    for row in rows:
        words = row.reason if row.status is not Status.OK else f"{row.latency_us:.1f} us"
        print(f"{row.arm} {row.batch}: {words}")
    print(ceilings_of(rows))
    for table in read_database(database) if database.exists() else []:
        if table.key.gpu == described.name:
            with Store.open(database) as store:
                number = store.begin_run(table.key, described, {"ceilings": True})
                store.add(number, rows)
                store.end_run(number, "done")
            print(f"stored under {table.key.digest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
