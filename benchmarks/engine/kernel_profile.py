"""Where a pass's time goes: kernels by kind, from traces of PyTorch's profiler.

As a test of `benchmarks.engine.run` (`--tests profile`) it profiles cases in each configuration.
By itself it reads traces that are there:

    python -m benchmarks.engine.kernel_profile TRACE.json.gz ...

The module is not called `profile`: Python's own has that name, and PyTorch loads it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import cases_of
from benchmarks.engine.session import Session

__all__ = ["KINDS", "kernels_of", "kind_of", "main", "measure", "summary_of"]

KINDS = (
    ("indexer logits", r"mqa_logits"),
    ("top-k", r"topk|top_k"),
    ("sparse attention", r"flash_mla|sparse|splitkv|flash_fwd_mla|mla|combine"),
    ("dense attention", r"flash::|FlashAttn|flash_fwd|fmha"),
    ("MoE", r"fused_moe|moe"),
    ("linear layers", r"gemm|nvjet|cutlass|sm90_xmma|cublas"),
    ("quantization", r"quant"),
    ("norms, rope, copies", r"norm|rope|rotary|copy|elementwise|cat|memcpy|memset|fill|index|act"
     r"|silu"),
)  # fmt: skip
"""Kinds of kernels by their names; the first that matches counts."""
_MATCHES = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS]
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LONGEST_NAME = 110
_TOP = 14
_PATIENCE_S = 60.0

Kernel = dict[str, Any]
"""An event of a trace: `name`, and `ts` and `dur` in microseconds."""


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for kind, pattern in _MATCHES if pattern.search(name)), "other")


def kernels_of(path: Path) -> list[Kernel]:
    """The work of the GPU in a trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = json.load(file)["traceEvents"]
    return [one for one in events if one.get("cat") in _GPU]


def summary_of(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Milliseconds by kind and by kernel; `busy_ms` counts what ran side by side once."""
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for one in kernels:
        name = one["name"][:_LONGEST_NAME]
        kinds[kind_of(one["name"])] += one["dur"]
        names[name] += one["dur"]
        counts[name] += 1
    first = min((one["ts"] for one in kernels), default=0)
    last = max((one["ts"] + one["dur"] for one in kernels), default=0)
    return {
        "kinds_ms": {kind: round(us / 1e3, 3) for kind, us in kinds.most_common()},
        "total_ms": round(sum(kinds.values()) / 1e3, 3),
        "busy_ms": round(_busy_us(kernels) / 1e3, 3), "span_ms": round((last - first) / 1e3, 3),
        "kernels": [
            {"name": name, "ms": round(us / 1e3, 3), "calls": counts[name]}
            for name, us in names.most_common(_TOP)
        ],
    }  # fmt: skip


def _busy_us(kernels: Iterable[Kernel]) -> float:
    busy, end = 0.0, float("-inf")
    for start, stop in sorted((one["ts"], one["ts"] + one["dur"]) for one in kernels):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a case and configuration. Cases: prefix:new:sequences, or d:sequences:context."""
    for case in options.profile_cases.split(","):
        for configuration in session.configurations:
            row = {"case": case, "configuration": configuration.name}
            if session.late:
                yield row | {"skipped": "out of time"}
                continue
            session.flush()
            session.use(configuration)
            row |= summary_of(_profiled(session, case, options.out / "profile"))
            print(_line(row), file=sys.stderr, flush=True)
            yield row


def _profiled(session: Session, case: str, folder: Path) -> list[Kernel]:
    folder.mkdir(parents=True, exist_ok=True)
    prompts, new = _prepared(session, case)
    before = set(folder.rglob("*.json*"))
    session.engine.start_profile(
        output_dir=str(folder), activities=["CPU", "GPU"], with_stack=False
    )
    session.ask(prompts, new)
    session.engine.stop_profile()
    found: list[Kernel] = []
    for path in _written(folder, before):
        found += kernels_of(path)
        # A trace is large, and all that counts is in the summary.
        path.unlink()
    return found


def _prepared(session: Session, case: str) -> tuple[list[list[int]], int]:
    """The prompts to profile, with their prefixes cached, and how many tokens to generate."""
    if case.startswith("d:"):
        _, count, context = case.split(":")
        prompts = [session.tokens(int(context)) for _ in range(int(count))]
        session.ask(prompts, 2)
        return prompts, 12
    (one,) = cases_of(case)
    heads = [session.tokens(length) for length in one.prefix]
    if any(heads):
        session.ask([head + session.tokens(1) for head in heads])

    def prompts_of() -> list[list[int]]:
        return [h + session.tokens(n) for h, n in zip(heads, one.new, strict=True)]

    session.ask(prompts_of())
    return prompts_of(), 1


def _written(folder: Path, before: set[Path]) -> list[Path]:
    """The new traces, once they do not grow any more."""
    deadline = time.monotonic() + _PATIENCE_S
    sizes: dict[Path, int] = {}
    while time.monotonic() < deadline:
        found = {path: path.stat().st_size for path in set(folder.rglob("*.json*")) - before}
        if found and found == sizes:
            return sorted(found)
        sizes = found
        time.sleep(1)
    raise RuntimeError(f"the engine wrote no trace into {folder}")


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"{kind} {ms:.1f}" for kind, ms in row["kinds_ms"].items()]
    return (
        f"profile {row['case']} {row['configuration']}: {row['busy_ms']:.1f} ms busy of "
        f"{row['span_ms']:.1f}: {', '.join(parts)}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print what each trace's time went to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+")
    for path in parser.parse_args(arguments).traces:
        found = summary_of(kernels_of(path))
        print(f"{path}: {found['busy_ms']} ms busy of {found['span_ms']}")
        for kind, ms in found["kinds_ms"].items():
            print(f"  {ms:10.2f} ms  {kind}")
        for one in found["kernels"]:
            print(f"    {one['ms']:8.2f} ms x{one['calls']:5d}  {one['name']}")


if __name__ == "__main__":
    main()
