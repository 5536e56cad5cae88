"""SGLang's real attention backend with the plug-in on and off: the same outputs?

    python -m benchmarks.sglang_backend pack FOLDER       needs a package index
    python -m benchmarks.sglang_backend run FOLDER        needs Hopper, PyTorch 2.11 and CUDA 13
    python -m benchmarks.sglang_backend rehearse FOLDER   anywhere: torch in place of kernels

`run` starts one process with the plug-in and one with NSA_TUNE_DISABLE=1. Both load the plug-ins
as SGLang does, build its `DeepseekSparseAttnBackend` from the wheel and run the same prefills,
decodes and verifications on a packed fp8 pool. What is SGLang's: the backend, its metadata, its
quantization and dequantization, its hook registry; sglang-kernel's FlashMLA; DeepGEMM. What is
not: the model around it, the pool's bookkeeping, top-k (random), and torch in place of
FlashAttention-3. The last line begins with OK, DIFFERENT or STOPPED; the exit code is 0 or 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._sglang_engine import VERSION, install, pack, torch_kernels, without_triton

TOLERANCE = 0.05
"""Relative. Without a prefix, SGLang's sparse kernel reads the new tokens before their fp8."""
SWITCH = "NSA_TUNE_DISABLE"
_ROOT = Path(__file__).parents[1]

Lens = list[tuple[int, int]]
EXTENDS: list[Lens] = [
    [(1920, 128)], [(0, 300)], [(0, 1024)], [(6000, 256)], [(30000, 16)], [(0, 3000)],
    [(0, 700), (3000, 64)], [(1500, 40)] * 4, [(100, 60), (1900, 7), (0, 33)],
]  # fmt: skip
"""(prefix, new) of each sequence."""
DECODES = ([5000, 700], [3000] * 16)
VERIFIES = (1, 8, 64)
"""Sequences of two draft tokens."""
SMALL_EXTENDS: list[Lens] = [[(300, 4)], [(0, 9)], [(0, 5), (2100, 2)]]


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("action", choices=("pack", "run", "rehearse", "child"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.action == "pack":
        pack(arguments.folder)
        size = sum(path.stat().st_size for path in arguments.folder.rglob("*") if path.is_file())
        print(f"{arguments.folder}: {size / 2**20:.0f} MiB")
    elif arguments.action == "child":
        child(arguments.folder, arguments.out)
    else:
        sys.exit(compare(arguments.folder, rehearse=arguments.action == "rehearse"))


# --- one process


def child(folder: Path, out: Path) -> None:
    """Run every pass and save what came of each, or what stopped it."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    rehearse = "REHEARSE" in os.environ
    if rehearse:
        torch.cuda.get_device_capability = lambda *_: (9, 0)
    install(folder, 90, torch_kernels() if rehearse else {})
    import_module("sglang.srt.plugins").load_plugins()
    from benchmarks._sglang_model import Model

    if rehearse:
        without_triton()

    sizes = {"heads": 16, "tokens": 32768} if rehearse else {"heads": 128, "tokens": 131072}
    device = torch.device("cpu" if rehearse else "cuda")
    torch.set_grad_enabled(False)
    model = Model(device, heads=sizes["heads"], tokens=sizes["tokens"], longest=32768)
    steps: dict[str, Callable[[], Any]] = {}
    for lens in SMALL_EXTENDS if rehearse else EXTENDS:
        steps[f"extend {lens}"] = lambda lens=lens: model.extend(lens)  # type: ignore[misc]
    for contexts in DECODES[:1] if rehearse else DECODES:
        steps[f"decode {contexts}"] = lambda own=contexts: model.decode(own)  # type: ignore[misc]
    for count in VERIFIES[:2] if rehearse else VERIFIES:
        steps[f"verify {count}"] = lambda count=count: model.verify(count)  # type: ignore[misc]
    found = {}
    for i, (name, step) in enumerate(steps.items()):
        # Each pass has numbers of its own, whatever became of the one before.
        model.random.manual_seed(i)
        found[name] = _outcome(step)
    torch.save({"steered": model.steered, "passes": found}, out)


def _outcome(step: Callable[[], Any]) -> dict[str, Any]:
    try:
        decided, values = step()
        return {"decided": decided, "values": values.float().cpu()}
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
            RuntimeError, TypeError, ValueError):  # fmt: skip
        return {"stopped": traceback.format_exc()}


# --- the comparison


def compare(folder: Path, *, rehearse: bool) -> int:
    """Run both processes and print what they make of each pass; 0 when all is well."""
    with TemporaryDirectory() as place:
        table = _table(Path(place), 16 if rehearse else 128)
        found = {}
        for name, off in (("on", "0"), ("off", "1")):
            saved = Path(place) / f"{name}.pt"
            command = [
                sys.executable, "-m", "benchmarks.sglang_backend", "child",
                str(folder.resolve()), str(saved),
            ]  # fmt: skip
            environment = {**os.environ, SWITCH: off, "NSA_TUNE_DB": str(table)}
            if rehearse:
                environment |= {"REHEARSE": "1", "TRITON_INTERPRET": "1"}
            done = subprocess.run(
                command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False
            )
            said = [line for line in done.stderr.splitlines() if "nsa_tune" in line]
            print(f"plug-in {name}: exit code {done.returncode}", *said, sep="\n  ")
            if done.returncode or not saved.exists():
                print(done.stdout[-2000:], done.stderr[-6000:])
                print(f"STOPPED: the process with the plug-in {name} did not end well")
                return 1
            found[name] = torch.load(saved)
    return _judge(found["on"], found["off"])


def _judge(on: dict[str, Any], off: dict[str, Any]) -> int:
    worst, stopped, changed, wrong = 0.0, 0, 0, 0
    for name, ours in on["passes"].items():
        theirs = off["passes"][name]
        failed = [one["stopped"] for one in (ours, theirs) if "stopped" in one]
        if failed:
            stopped += 1
            print(f"{name}: STOPPED\n{failed[0]}")
            continue
        error = _error(ours["values"], theirs["values"])
        worst, wrong = max(worst, error), wrong + (error > TOLERANCE)
        changed += ours["decided"] != theirs["decided"]
        print(f"{name}: SGLang {theirs['decided']}, steered {ours['decided']}, error {error:.2g}")
    steered, plain = on["steered"], off["steered"]
    print(json.dumps({"steered": steered, "left alone": plain, "sglang": VERSION}))
    if wrong or not all(steered.values()) or any(plain.values()) or not changed:
        print(f"DIFFERENT: {wrong} passes beyond {TOLERANCE}, {changed} decided otherwise")
        return 1
    if stopped:
        print(f"STOPPED: {stopped} passes; the others agree to {worst:.2g}")
        return 1
    count = len(on["passes"])
    print(f"OK: {count} passes, {changed} decided otherwise, outputs agree to {worst:.2g}")
    return 0


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference of a row, relative to the row's norm."""
    if ours.shape != theirs.shape or not ours.isfinite().all():
        return float("inf")
    norm = theirs.flatten(1).norm(dim=1).clamp_min(1e-6)
    return float(((ours - theirs).flatten(1).norm(dim=1) / norm).max())


def _table(folder: Path, heads: int) -> Path:
    """The H100's shipped table, as if it had been measured here and with so many heads."""
    from nsa_tune.backend.hardware import detect
    from nsa_tune.db import reader as tables
    from nsa_tune.db.text_table import format_table, read_text

    path = next(one for one in tables.shipped() if one.name.endswith("v3.2_h128_fp8.tsv"))
    table = read_text(path)
    gpu = detect.local_device_name()
    here = replace(
        table, key=replace(table.key, gpu=gpu, heads=heads), device=replace(table.device, name=gpu)
    )
    copy = folder / "table.tsv"
    copy.write_text(format_table(here))
    return copy


if __name__ == "__main__":
    main()
