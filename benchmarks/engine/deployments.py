"""Run the engines of deployments.toml on the GPUs of this host, side by side where they fit.

    python -m benchmarks.engine.deployments OUT [NAME ...] [--seconds 1800] [--list]

Without names all run, in the file's order: each when as many GPUs as it takes are free. OUT/NAME
gets the harness's result.json, passes.jsonl and log. An engine runs in a copy of the checkout, so
that a table that a test breaks is its own. What is not over in its seconds is ended with all its
processes; what it had measured by then is kept. The exit code is 1 if one failed or was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Deployment", "Running", "main", "read", "started"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_FOLDERS = {"batches": str(_HERE / "batches"), "traces": str(_HERE / "results" / "traces")}
_PORT, _PORTS = 30300, 50
_LEAST_S = 60.0
"""An engine is not started for less: it would be up for no test."""
_ENDING_S = 15.0
"""From the harness's last case to the end of its processes."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """An engine to run."""

    name: str
    run: str
    """Options of `benchmarks.engine.run`, with `{tree}` for the copy of the checkout."""
    seconds: float
    gpus: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `sglang.Engine`."""


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that runs, its GPUs, and when it is ended, by the monotonic clock."""

    deployment: Deployment
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    until_s: float


def read(path: Path = _HERE / "deployments.toml") -> list[Deployment]:
    """The deployments of a file; a word in braces in `run` stands for one of its options."""
    content = tomllib.loads(path.read_text())
    words = content["options"] | _FOLDERS | {"tree": "{tree}"}
    found = []
    for name, fields in content["deployments"].items():
        run = fields["run"]
        while (said := run.format_map(words)) != run:
            run = said
        found.append(Deployment(name, **fields | {"run": run}))
    return found


def arguments(deployment: Deployment, out: Path, port: int, seconds: float) -> list[str]:
    """The harness's options, shell-like words split."""
    engine = {"port": port, "nccl_port": port + 5} | dict(deployment.engine)
    run = deployment.run.replace("{tree}", str(out / "tree"))
    ends = ["--engine", json.dumps(engine), "--seconds", f"{seconds:.0f}", "--out", str(out)]
    return [*shlex.split(run), *ends]


def started(
    deployment: Deployment, folder: Path, gpus: Sequence[str], port: int, left_s: float,
    command: Sequence[str] = (sys.executable, "-u", "-m", "benchmarks.engine.run"),
) -> Running:  # fmt: skip
    """Start an engine in a copy of the checkout, in a process group of its own."""
    out = folder / deployment.name
    ignored = shutil.ignore_patterns("__pycache__", "results", "held_out")
    for package in ("nsa_tune", "benchmarks"):
        shutil.copytree(_ROOT / package, out / "tree" / package, ignore=ignored, dirs_exist_ok=True)
    path = f"{out / 'tree'}:{os.environ.get('PYTHONPATH', '')}"
    own = {"PYTHONPATH": path, "XDG_DATA_HOME": str(out / "data")}
    # Git is asked from the copy for the commit that results name.
    own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "GIT_DIR": str(_ROOT / ".git")}
    seconds = min(deployment.seconds, left_s)
    words = [*command, *arguments(deployment, out, port, seconds - _ENDING_S)]
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=out / "tree", env=os.environ | own, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    return Running(deployment, process, tuple(gpus), time.monotonic() + seconds)


def run_all(wanted: Sequence[Deployment], folder: Path, gpus: Sequence[str], seconds: float) -> int:
    """Run them; how many failed, were ended, or found no time."""
    end_s, free, waiting = time.monotonic() + seconds, list(gpus), list(wanted)
    running: list[Running] = []
    failed = 0
    while waiting or running:
        left_s = end_s - time.monotonic()
        while waiting and (waiting[0].gpus > len(gpus) or left_s < _LEAST_S):
            print(f"{waiting.pop(0).name}: not run, for want of GPUs or time", file=sys.stderr)
            failed += 1
        if waiting and waiting[0].gpus <= len(free):
            taken, free = free[: waiting[0].gpus], free[waiting[0].gpus :]
            port = _PORT + _PORTS * (len(wanted) - len(waiting))
            running.append(started(waiting.pop(0), folder, taken, port, left_s))
            continue
        time.sleep(0.2)
        for engine in [engine for engine in running if _is_over(engine)]:
            running.remove(engine)
            free += engine.gpus
            code = engine.process.returncode
            failed += code != 0
            print(f"{engine.deployment.name}: exit code {code}", file=sys.stderr)
    return failed


def _is_over(engine: Running) -> bool:
    """Whether it has ended; where its time is up, end it with all that it started."""
    ended = engine.process.poll() is not None
    if not ended and time.monotonic() < engine.until_s:
        return False
    with suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
    return True


def visible_gpus() -> list[str]:
    """The GPUs to use: those of CUDA_VISIBLE_DEVICES, else all."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def main(given: list[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder for results")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all together")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    options = parser.parse_args(given)
    known = {deployment.name: deployment for deployment in read()}
    if unknown := set(options.names) - known.keys():
        parser.error(f"no deployment {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = [known[name] for name in options.names or known]
    if options.list:
        for deployment in wanted:
            print(f"{deployment.name}: {deployment.gpus} GPUs, {deployment.seconds:.0f} s")
        return 0
    failed = run_all(wanted, options.out.resolve(), visible_gpus(), options.seconds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
