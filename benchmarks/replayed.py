"""The table of docs/replay.md: traces replayed on the H200's tables.

    python benchmarks/replayed.py "Mooncake conversation=mooncake.jsonl" "Azure 2023=azure.csv"

Prints a row for each trace, head count and KV format: seconds of attention in all prefill and all
decode passes as the engine chooses, and what the others save of both together.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

_GPU = "NVIDIA H200"
_WAYS = ("plug-in", "table", "best arm")


def replayed(path: str, heads: str, kv_dtype: str) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "nsa_tune.cli", "replay", path, "--gpu", _GPU, "--model",
        "deepseek-v3.2", "--heads", heads, "--kv-dtype", kv_dtype, "--json",
    ]  # fmt: skip
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def _percent(part: float) -> str:
    return f"{round(part, 3) + 0.0:.1%}"


def row(name: str, heads: str, kv_dtype: str, found: dict[str, Any]) -> str:
    kinds = found["kinds"]
    engine = {kind: one["ways"]["engine"]["seconds"] for kind, one in kinds.items()}
    whole = sum(engine.values())
    saved = [
        1 - sum(one["ways"][way]["seconds"] for one in kinds.values()) / whole for way in _WAYS
    ]
    static = sum(one["static"]["seconds"] for one in kinds.values())
    flags = [flag for one in kinds.values() for flag in one["static"]["flags"]]
    words = ", ".join(f"`{flag}`" for flag in flags) or "the defaults"
    cells = [
        name, heads, kv_dtype, f"{engine['prefill']:.0f}", f"{engine['decode']:.0f}",
        f"{_percent(1 - static / whole)}: {words}",
        *map(_percent, saved),
        ", ".join(sorted({step for one in kinds.values() for step in one["unpriced"]})) or "-",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _named(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=_named, metavar="NAME=FILE")
    columns = (
        "trace", "heads", "KV", "prefill s", "decode s", "best flags save", "the plug-in",
        "the table", "the best arms", "not priced everywhere",
    )  # fmt: skip
    traces = parser.parse_args().traces
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, path in traces:
        for heads in ("16", "128"):
            for kv_dtype in ("bf16", "fp8"):
                print(row(name, heads, kv_dtype, replayed(path, heads, kv_dtype)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
