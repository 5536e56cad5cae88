"""How long `nsa-tune report` takes over a database of 10,000 measurements, and how big its page is.

python -m benchmarks.report
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from nsa_tune.db.exchange import import_text
from nsa_tune.db.reader import shipped
from nsa_tune.db.store import Store

MEASUREMENTS = 10_000
"""As many as a database of all head counts and KV formats on one GPU, and of a few on another."""
REPEATS = 3


def fill(database: Path) -> int:
    """Import shipped tables into `database` until it has enough; how many measurements it has."""
    total = 0
    with Store.open(database) as store:
        for path in shipped():
            total += import_text(store, path)
            if total >= MEASUREMENTS:
                break
    return total


def seconds(database: Path, *arguments: str) -> float:
    """The fastest of some runs of the whole command, Python's start included."""
    command = [sys.executable, "-m", "nsa_tune.cli", "report", "--db", str(database), *arguments]
    taken = []
    for _ in range(REPEATS):
        started = perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        taken.append(perf_counter() - started)
    return min(taken)


def main() -> None:
    """Print what each format takes."""
    with tempfile.TemporaryDirectory() as directory:
        database, page = Path(directory) / "many.db", Path(directory) / "report.html"
        print(f"{fill(database)} measurements")
        print(f"terminal: {seconds(database):.2f} s")
        taken = seconds(database, "--format", "html", "--out", str(page))
        print(f"html: {taken:.2f} s, {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
