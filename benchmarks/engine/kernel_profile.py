"""Where a prefill's time goes: what the GPU idles, and what Python does.

Each batch runs once more in each configuration, under PyTorch's profiler of the GPU's work in the
engine's own process; the first `--host-cases` batches again under Python's profiler.

The module is not called `profile`: Python's own has that name, and PyTorch loads it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.engine.cases import Case, cases_of
from benchmarks.engine.configurations import Configuration
from benchmarks.engine.prefill import batches_of, cached, ran
from benchmarks.engine.session import Session

__all__ = ["measure"]

_GPU, _HOST = 1, 2


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a batch and configuration."""
    cases = cases_of(options.profile_cases) or batches_of(options)
    plain = [one for one in session.configurations if one.plugin and one.pass_mode is None]
    chosen = [session.default, *plain[:1]]
    for number, case in enumerate(cases):
        if session.late:
            yield {"case": case.name, "skipped": "out of time"}
            continue
        hows = (_GPU, _HOST) if number < options.host_cases else (_GPU,)
        for row in _profiled(session, case, chosen, hows):
            print(_line(row), file=sys.stderr, flush=True)
            yield row


def _profiled(
    session: Session, case: Case, chosen: Sequence[Configuration], hows: Sequence[int]
) -> Iterable[dict[str, Any]]:
    heads = cached(session, case)
    tags: dict[int, str] = {}
    for configuration in chosen:
        session.use(configuration)
        for how in hows:
            tags[session.tag(profiles=how)] = configuration.name
            tails = [session.tokens(n, repeats=case.repeats) for n in case.new]
            session.ask([h + tail for h, tail in zip(heads, tails, strict=True)])
    rows: dict[str, dict[str, Any]] = {}
    for one in session.collect():
        if one["tag"] in tags and one["mode"] == "EXTEND" and not one["draft"]:
            name = tags[one["tag"]]
            row = rows.setdefault(name, {"configuration": name, "busy_ms": 0.0, "ran": ran(one)})
            kernels = one.get("kernels", {"busy_ms": 0.0})
            # Of several passes all else is the last one's.
            row |= kernels | {"busy_ms": round(row["busy_ms"] + kernels["busy_ms"], 3)}
            row |= {"python": one["python"]} if "python" in one else {}
    lengths = {"case": case.name, "prefix": list(case.prefix), "new": list(case.new)}
    return [lengths | row for row in rows.values()]


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"profile {row['case']} {row['configuration']} ({row['ran']}): "
        f"{row['busy_ms']:.1f} ms busy of {row.get('span_ms', 0):.1f}"
    )
