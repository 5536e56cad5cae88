"""Time a vLLM with a V3.2 or V3 of a few layers and random weights, the plug-in off and on.

    python -m benchmarks.vllm.run --heads 16 --kv-dtype fp8 --out build/vllm

Each round of a case runs the same prompts with the plug-in off, on and off again. A time is the
GPU's between the start and the end of vLLM's model runner; where the host launches kernels slower
than the GPU runs them, it is the host's. The JSON file is written anew after each case, and when
something fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.vllm.cases import Case, cases_of
from benchmarks.vllm.engine import VOCABULARY, Engine, Options, set_environment
from benchmarks.vllm.measured import Measured

__all__ = ["Report", "main", "measure"]

_SCHEMA = 1


class Report:
    """What is known so far, on disk."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._path = path
        self._start = time.monotonic()
        named = {name: str(value) for name, value in vars(options).items()}
        self._known: dict[str, Any] = {"schema": _SCHEMA, "options": named, "cases": []}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def know(self, **facts: Any) -> None:
        """Take in `facts`."""
        self._known |= facts | {"seconds": round(self.seconds, 1)}
        self._write()

    def add(self, case: dict[str, Any]) -> None:
        """Take in a case."""
        self._known["cases"].append(case)
        self.know()

    def _write(self) -> None:
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._known, indent=1) + "\n")
        partial.replace(self._path)


def measure(
    engine: Any, case: Case, rounds: int, random: Random, *, held: bool = False
) -> Measured:
    """Run `case` for `rounds` after one that only warms up."""
    found = Measured(case)
    heads = [_tokens(random, prefix) for prefix, _ in case.lens]
    for i in range(rounds + 1):
        tails = [_tokens(random, new) for _, new in case.lens]
        off, on, again = (
            engine.run(heads, tails, plugin=plugin, held=held) for plugin in (False, True, False)
        )
        if i:
            found.add(off, on, again)
    return found


def _tokens(random: Random, count: int) -> list[int]:
    return random.choices(range(2, VOCABULARY), k=count)


def _run(options: argparse.Namespace, report: Report) -> None:
    cases = cases_of(options.cases)
    report.know(stage="start", versions=_versions())
    given = {name: getattr(options, name) for name in Options._fields}
    engine = Engine(Options(**given), options.models)
    report.know(stage="cases", builders=engine.builders, steered=engine.steered)
    _say(report, f"vLLM has started; the plug-in steers {engine.steered} of its builders")
    random = Random(options.seed)
    for case, held in product(cases, (False, True)[: 1 + options.held]):
        if report.seconds > options.seconds:
            _say(report, f"no time left for {case} and what follows")
            return
        try:
            found = measure(engine, case, options.rounds, random, held=held)
        except Exception as error:  # the other cases may still run
            problem = f"{type(error).__name__}: {error}"[:2000]
            report.add({"case": str(case), "failed": problem})
            _say(report, f"{case} failed: {problem}")
            traceback.print_exc()
            if "CUDA error" in str(error):
                raise
            continue
        report.add(found.record() | {"held": held})
        _say(report, ("GPU alone: " if held else "") + found.line())
    report.know(stage="done")


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("vllm", "torch", "transformers")}


def _say(report: Report, text: str) -> None:
    print(f"[{report.seconds:.0f} s] {text}", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--heads", type=int, default=16, choices=(8, 16, 32, 64, 128), help="local heads")
    add("--model", default="deepseek-v3.2", choices=("deepseek-v3.2", "deepseek-v3"))
    add("--kv-dtype", default="fp8", choices=("fp8", "bfloat16"))
    add("--layers", type=int, default=6)
    add(
        "--cases", default="", help="prefix:new:sequences:decodes,... to run, not the built-in ones"
    )
    add("--rounds", type=int, default=5, help="of each case, after one that warms up")
    add("--held", action="store_true", help="time each case by the GPU alone, too")
    add("--chunk", type=int, default=16384, help="the most tokens of a step")
    add("--longest", type=int, default=65536, help="the most tokens of a request")
    add("--kv-gib", type=float, default=8, help="size of the KV cache")
    add("--seed", type=int, default=1)
    add("--seconds", type=float, default=420, help="no new case after so long")
    add("--hang", type=float, default=150, help="print the stacks of all threads every so often")
    add("--models", type=Path, default=Path("build/vllm/models"))
    add("--out", type=Path, default=Path("build/vllm"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; the process's exit code."""
    options = _options(arguments)
    set_environment()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nsa_tune").setLevel(logging.INFO)
    faulthandler.dump_traceback_later(options.hang, repeat=True, file=2)
    report = Report(
        options.out / f"vllm-{options.model}-{options.kv_dtype}-{options.heads}.json", options
    )
    try:
        _run(options, report)
    except Exception:  # noqa: BLE001  # an engine fails in many ways; the report says how
        report.know(failed=traceback.format_exc()[-8000:])
        traceback.print_exc()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An engine in this process may hang when it is torn down.
    os._exit(code)
