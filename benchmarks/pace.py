"""How many measurements a second each of two runs of the same grid made: on one GPU, and on all.

    python -m benchmarks.pace --executor ray [--address auto] -- --model deepseek-v3.2 --heads 128
    python -m benchmarks.pace --executor local
    python -m benchmarks.pace one.jsonl all.jsonl [--after 0,100,200]

With --executor both runs are made here: the first one on cuda:0 of this host, the second one on all
GPUs of this host, or of a Ray cluster (without --address a new one on this host). Options behind --
go to both runs. Otherwise the two files are what `nsa-tune run --target-regret 0 --events FILE`
wrote.

Both runs take the batches in the same order, so that what was done after the first N of them is the
same work: a run that compiled kernels on its first batches is told from one that did not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def batches_of(path: Path) -> list[tuple[float, int]]:
    """(seconds since the start, measurements) of each batch that a run reported."""
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(one["seconds"], len(one["rows"])) for one in events if one["event"] == "batch"]


def pace(batches: list[tuple[float, int]], after: int) -> float:
    """Measurements a second behind the first `after` batches."""
    start = batches[after - 1][0] if after else 0.0
    return sum(rows for _, rows in batches[after:]) / (batches[-1][0] - start)


def table(one: Path, other: Path, afters: list[int]) -> list[str]:
    """Lines that compare two runs, for each count of batches that both have left behind."""
    first, second = batches_of(one), batches_of(other)
    lines = ["| after batches | one, 1/s | other, 1/s | ratio |", "|---|---|---|---|"]
    for after in afters:
        if after < min(len(first), len(second)):
            slow, fast = pace(first, after), pace(second, after)
            lines.append(f"| {after} | {slow:.1f} | {fast:.1f} | {fast / slow:.2f} |")
    return lines


def measure(name: str, out: Path, options: list[str]) -> Path:
    """Run nsa-tune over the whole grid into a new database; returns the file of its events."""
    database, events = out / f"{name}.db", out / f"{name}.jsonl"
    for old in (database, events):
        old.unlink(missing_ok=True)
    words = ["--target-regret", "0", "--db", str(database), "--events", str(events), "--quiet"]
    command = [sys.executable, "-m", "nsa_tune.cli", "run", *words, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return events


def pair(
    executor: str, address: str | None, device: str, out: Path, options: list[str]
) -> tuple[Path, Path]:
    """A run on one device of this host, and one on all devices of `executor`."""
    on_gpus = device == "cuda"
    one = measure("one", out, ["--device", "cuda:0" if on_gpus else device, *options])
    words = ["--executor", executor, "--device", "all" if on_gpus else device]
    if executor == "ray":
        words += ["--address", address or "local"]
    return one, measure(executor, out, [*words, *options])


def main() -> None:
    """Print a table for each pair of runs."""
    parser = argparse.ArgumentParser(description="Measurements a second of two runs.")
    parser.add_argument("files", type=Path, nargs="*", help="events of two runs")
    parser.add_argument("--after", default="0,100,200", help="batches, comma-separated")
    parser.add_argument("--executor", choices=["local", "ray"], help="make the runs here")
    parser.add_argument("--address", help="of a Ray cluster; by default a new one on this host")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/pace"))
    parser.add_argument("--pairs", type=int, default=1, help="of runs; the first one compiles")
    own, options = _split(sys.argv[1:])
    arguments = parser.parse_args(own)
    afters = [int(after) for after in arguments.after.split(",")]
    if arguments.executor is None:
        if len(arguments.files) != 2:
            parser.error("give the events of two runs, or --executor")
        one, other = arguments.files
        print(*table(one, other, afters), sep="\n")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for _ in range(arguments.pairs):
        given = (arguments.executor, arguments.address, arguments.device, arguments.out)
        files = pair(*given, options)
        print(*table(*files, afters), sep="\n", flush=True)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and behind "--"."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    main()
