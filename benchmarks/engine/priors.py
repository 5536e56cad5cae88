"""Make priors of what engines' starts have measured, to ship in nsa_tune/tables/pass-times.

    python -m benchmarks.engine.priors DATA/nsa-tune/pass-times --out nsa_tune/tables/pass-times

Only engines of SGLang's own graph sizes count: the sizes are part of a key, which nobody else's
engine would have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

__all__ = ["main", "name_of"]

_LAYERS = {"deepseek-v3.2": 61, "glm-5": 78}
_LARGEST = 8192
"""Tokens of SGLang's largest prefill graph."""


def name_of(key: Mapping[str, object]) -> str:
    """A file's name, as tables have them."""
    gpu = str(key["gpu"]).removeprefix("NVIDIA ").lower().replace(" ", "-")
    drafts = f"_mtp{key['draft_tokens']}" if key["draft_tokens"] else ""
    sglang, model, heads = key["sglang"], key["model"], key["heads"]
    return f"{gpu}_sglang-{sglang}_{model}_h{heads}_{key['kv_dtype']}{drafts}.json"


def _unfit(key: Mapping[str, object]) -> str | None:
    """Why no user's engine has this key; None where one may have it."""
    if key["layers"] != _LAYERS.get(str(key["model"])):
        return f"it has {key['layers']} layers"
    sizes = key["prefill_sizes"]
    if not isinstance(sizes, list) or max(sizes) != _LARGEST or len(sizes) < 50:
        return f"its prefill graphs are not SGLang's own: {sizes}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Write the priors; 0 when there was one."""
    parser = argparse.ArgumentParser(description="Make priors of measured pass times.")
    parser.add_argument("folder", type=Path, help="the files that starts have kept")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    written = 0
    for path in sorted(options.folder.glob("*.json")):
        times = PassTimes.from_text(path.read_text(encoding="utf-8"))
        reason = _unfit(times.key)
        if reason is not None:
            print(f"{path.name} is left out: {reason}", file=sys.stderr)
            continue
        # What a start found out is that machine's own.
        text = PassTimes(times.key, times.times, times.table).as_text()
        options.out.mkdir(parents=True, exist_ok=True)
        compact = json.dumps(json.loads(text), separators=(",", ":"))
        (options.out / name_of(times.key)).write_text(compact + "\n", encoding="utf-8")
        written += 1
    return 0 if written else 1


if __name__ == "__main__":
    raise SystemExit(main())
