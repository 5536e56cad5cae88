"""How long `nsa-tune replay` takes for a million requests, and how much memory.

    python benchmarks/million.py [--requests 1000000] [--gpu "NVIDIA H200"] [--heads 128]
        [--pass-times FILE]

The trace is made up: prompts and answers of lognormal lengths, one request in two with one of 200
shared beginnings, evenly busy. The replay runs in a process of its own, whose peak memory is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random


def write(path: Path, requests: int, random: Random) -> None:
    """The trace, in nsa-tune's own JSON lines."""
    now = 0.0
    with path.open("w", encoding="utf-8") as out:
        for _ in range(requests):
            now += random.expovariate(12)
            shared = random.randrange(1, 12) * 512 if random.random() < 0.5 else 0
            one: dict[str, object] = {
                "arrival_s": round(now, 4),
                "input_tokens": shared + min(int(random.lognormvariate(6.5, 1.2)) + 1, 60_000),
                "output_tokens": min(int(random.lognormvariate(5, 1)) + 1, 4000),
            }
            if shared:
                one |= {"shared": f"s{random.randrange(200)}", "shared_tokens": shared}
            out.write(json.dumps(one) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--heads", default="128")
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--pass-times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "made_up.jsonl"
        write(trace, given.requests, Random(0))
        command = [
            sys.executable, "-m", "nsa_tune.cli", "replay", str(trace), "--json", "--gpu",
            given.gpu, "--model", "deepseek-v3.2", "--heads", given.heads, "--kv-dtype",
            given.kv_dtype, *(("--pass-times", given.pass_times) if given.pass_times else ()),
        ]  # fmt: skip
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
    if status:
        return 1
    kinds = json.loads(text)["kinds"]
    passes = {name: kind["passes"] for name, kind in kinds.items()}
    cpu_s = used.ru_utime + used.ru_stime
    print(
        f"{given.requests} requests, {passes}: {seconds:.1f} s ({cpu_s:.1f} s of a CPU core), "
        f"{used.ru_maxrss / 1024:.0f} MiB at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
