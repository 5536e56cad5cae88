"""Make priors, to ship, of what engines' starts and runs of the harness have measured.

    python -m benchmarks.engine.priors DATA/nsa-tune/pass-times --out nsa_tune/tables/pass-times
    python -m benchmarks.engine.priors RESULT.json --out nsa_tune/tables/passes

Of starts, which are in a folder, only those count that had graphs of all sizes that are measured
with SGLang's own list: others would not fit anybody's engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nsa_tune import Batch
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

__all__ = ["main", "name_of", "passes_of"]

_LAYERS = {"deepseek-v3.2": 61, "deepseek-v3": 61, "glm-5": 78}
_MEASURED = [64 << i for i in range(8)]
"""Tokens of the prefill graphs that are measured with SGLang's own list."""


def name_of(key: Mapping[str, object]) -> str:
    """A file's name, as tables have them."""
    gpu = str(key["gpu"]).removeprefix("NVIDIA ").lower().replace(" ", "-")
    drafts = f"_mtp{key['draft_tokens']}" if key.get("draft_tokens") else ""
    sglang, model, heads = key.get("sglang") or key["version"], key["model"], key["heads"]
    return f"{gpu}_sglang-{sglang}_{model}_h{heads}_{key['kv_dtype']}{drafts}.json"


def _unfit(key: Mapping[str, object]) -> str | None:
    """Why no user's engine has this key; None where one may have it."""
    if key["layers"] != _LAYERS.get(str(key["model"])):
        return f"it has {key['layers']} layers"
    sizes = key["prefill_sizes"]
    if not isinstance(sizes, list) or max(sizes) != _MEASURED[-1] or set(_MEASURED) - set(sizes):
        return f"its prefill graphs are not SGLang's own: {sizes}"
    return None


def _kept(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each file of a start that others may have."""
    for path in sorted(folder.glob("*.json")):
        times = PassTimes.from_text(path.read_text(encoding="utf-8"))
        reason = _unfit(times.key)
        if reason is not None:
            print(f"{path.name} is left out: {reason}", file=sys.stderr)
            continue
        # What a start found out is that machine's own.
        text = PassTimes(times.key, times.times, times.table).as_text()
        yield name_of(times.key), json.dumps(json.loads(text), separators=(",", ":")) + "\n"


def passes_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The passes of a run of the harness as they ship: its prefills that were one pass each."""
    options, gpu, versions = document["options"], document["gpu"], document["versions"]
    key = {
        "gpu": gpu["name"], "engine": "sglang", "version": versions["sglang"],
        "model": options["model"], "layers": options["layers"], "heads": options["heads"],
        "kv_dtype": document["kv_dtype"], "ep": options.get("ep", 1),
    }  # fmt: skip
    source = {
        "page": "docs/gains.md", "driver": gpu["driver_version"], "torch": versions["torch"],
        "commit": document["nsa_tune"]["commit"],
        "what": "median GPU times; one rank, random weights, no all-reduce",
    }  # fmt: skip
    chosen = {each["name"]: each for each in document["configurations"]}
    rows = [
        [str(Batch.extend(case["prefix"], case["new"])), setup, way, round(run["gpu_ms"], 1)]
        for case in document["tests"]["prefill"]
        if case.get("passes") == 1
        for name, run in case["configurations"].items()
        for setup, way in _setups(chosen[name], run["ran"])
    ]
    return {"schema": "nsa-tune/engine-passes/1", "key": key, "source": source, "passes": rows}


def _setups(configuration: Mapping[str, Any], ran: list[str]) -> Iterator[tuple[str, str]]:
    """(configuration, way) of a pass that always ran in the same way; else none."""
    if len(ran) == 1 and not configuration["environment"]:
        way = {"graph": "engine", "eager": "eager"}.get(ran[0].split()[-1], ran[0])
        usual = configuration["prefill_impl"] or "default"
        yield ("plug-in" if configuration["plugin"] else usual), way


def main(arguments: list[str] | None = None) -> int:
    """Write the priors; 0 when there was one."""
    parser = argparse.ArgumentParser(description="Make priors of measured pass times.")
    parser.add_argument("source", type=Path, help="the folder that starts have kept, or a result")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.source.is_dir():
        files = list(_kept(options.source))
    else:
        passes = passes_of(json.loads(options.source.read_text(encoding="utf-8")))
        text = json.dumps(passes, separators=(",", ":")).replace('["extend', '\n["extend')
        name = name_of(passes["key"]).replace(".json", f"_{passes['key']['layers']}_layers.json")
        files = [(name, text + "\n")]
    for name, text in files:
        (options.out / name).write_text(text, encoding="utf-8")
    return 0 if files else 1


if __name__ == "__main__":
    raise SystemExit(main())
