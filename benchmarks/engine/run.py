"""Start one SGLang engine with random weights, and measure nsa-tune's plug-in in it.

    python -m benchmarks.engine.run --kv auto --tests prefill,decode --out FOLDER

Run it from the repository's root, on a host with a GPU and SGLang (docs/engine.md). It writes
FOLDER/result.json (schema "nsa-tune/engine/1") and FOLDER/passes.jsonl, a line a forward pass. A
test that fails is noted in the result, and the next one runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine import (
    decode,
    kernel_profile,
    outputs,
    prefill,
    ranks,
    replay,
    soak,
    states,
)
from benchmarks.engine.arguments import (
    KV_DTYPES,
    add_engine_options,
    add_run_options,
    engine_arguments,
    fill_in,
    model_folder,
    set_environment,
)
from benchmarks.engine.cases import ragged_cases
from benchmarks.engine.configurations import (
    FORCED,
    Configuration,
    configurations_for,
    dumped,
    parsed,
)
from benchmarks.engine.control import Control
from benchmarks.engine.probe import Settings
from benchmarks.engine.session import Session, installed_probe
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.pass_mode.seconds import ENGINE

__all__ = ["SCHEMA", "Result", "main"]

SCHEMA = "nsa-tune/engine/1"

Test = Callable[[Session, argparse.Namespace], Iterable[dict[str, Any]]]

TESTS: dict[str, Test] = {
    "prefill": prefill.measure,
    "loaded": prefill.measure_loaded,
    "decode": decode.measure,
    "trace": replay.measure,
    "outputs": outputs.measure,
    "profile": kernel_profile.measure,
    "ranks": ranks.measure,
    "soak": soak.measure,
    "states": states.measure,
}

_ROOT = Path(__file__).resolve().parents[2]
_OWN_VARIABLES = ("NSA_TUNE", "SGLANG")
_DISTRIBUTIONS = (
    "sglang", "sglang-kernel", "torch", "triton", "sgl-deep-gemm", "sgl-flash-mla",
    "flashinfer-python", "transformers",
)  # fmt: skip


class Result:
    """The document that a run writes, saved after each row."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.document: dict[str, Any] = {"schema": SCHEMA} | head | {"tests": {}, "errors": {}}

    def save(self) -> None:
        """Write it: the old document or the new one, never half of one."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n")
        part.replace(self._path)

    def note(self, name: str, error: Exception) -> None:
        """Say in the document what went wrong."""
        self.document["errors"][name] = f"{type(error).__name__}: {error}"
        self.save()

    def run(self, name: str, test: Test, session: Session, options: argparse.Namespace) -> None:
        """Run one test; whatever it raises is noted."""
        rows = self.document["tests"].setdefault(name, [])
        begin = time.monotonic()
        try:
            for row in test(session, options):
                rows.append(row)
                self.save()
        except Exception as error:  # noqa: BLE001 - the next test may well work
            self.note(name, error)
            traceback.print_exc()
        self.document.setdefault("seconds", {})[name] = round(time.monotonic() - begin, 1)
        self.save()


def main(arguments: list[str] | None = None) -> int:
    """Measure; 0 when every test ran to its end."""
    options = _parsed(arguments)
    configurations = _configurations(options)
    # What the plug-in measures and captures at the start is for configurations that have it.
    options.no_plugin |= not any(one.plugin for one in configurations)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = _settings(options, configurations)
    set_environment(options)
    control = Control.create(settings.control)
    start = next((one for one in configurations if one.plugin), configurations[0])
    control.write(configuration=configurations.index(start))
    result = Result(options.out / "result.json", _head(options, configurations, start))
    with installed_probe(settings, options.out / "plugin"):
        _measure(options, settings, control, result)
    return 1 if result.document["errors"] else 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser)
    add_run_options(parser)
    options = fill_in(parser.parse_args(arguments))
    options.out = options.out.resolve()
    unknown = {one.partition(":")[0] for one in options.tests.split(",")} - set(TESTS)
    if unknown:
        parser.error(f"no test is called {', '.join(sorted(unknown))}")
    if options.batches is not None:
        try:
            ragged_cases(options.batches.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError, KeyError) as error:
            # Not when the engine has started, minutes later.
            parser.error(f"--batches {options.batches}: {error}")
    return options


def _configurations(options: argparse.Namespace) -> tuple[Configuration, ...]:
    given = options.configurations.strip()
    built_in = configurations_for(KV_DTYPES[options.kv], plugin=not options.no_plugin)
    if given.startswith("["):
        found = parsed(given)
    else:
        names = [name for name in given.split(",") if name]
        forced = () if options.no_plugin else FORCED
        built_in += tuple(one for one in forced if one.name in names)
        unknown = set(names) - {one.name for one in built_in}
        if unknown:
            raise SystemExit(f"no configuration is built in as {', '.join(sorted(unknown))}")
        found = tuple(one for one in built_in if not names or one.name in names)
    wanted = not options.no_plugin and any(one.plugin for one in found)
    if wanted and find_spec("nsa_tune.engines.sglang.switch") is None:
        raise SystemExit(
            "this nsa-tune cannot be switched off between passes (there is no module "
            "nsa_tune.engines.sglang.switch): measure SGLang alone with --no-plugin"
        )
    return found


def _settings(options: argparse.Namespace, configurations: tuple[Configuration, ...]) -> Settings:
    passes = options.out / "passes.jsonl"
    passes.unlink(missing_ok=True)
    return Settings(
        options.out / "control", passes, configurations, layers=options.as_layers,
        ranks=options.real_tp, fault=options.fault,
    )  # fmt: skip


def _measure(
    options: argparse.Namespace, settings: Settings, control: Control, result: Result
) -> None:
    begin, before = time.monotonic(), last_start.kept("start")
    # Not imported at the top: it takes seconds, and wrong options should be told before.
    named = engine_arguments(options, model_folder(options, options.out))
    try:
        engine = import_module("sglang.srt.entrypoints.engine").Engine(**named)
    except Exception as error:
        result.note("start", error)
        raise
    result.document["start_s"] = round(time.monotonic() - begin, 1)
    result.save()
    print(f"the engine is up after {result.document['start_s']} s", file=sys.stderr, flush=True)
    try:
        capacity = _capacity(engine, options.max_total)
        result.document["engine"]["kv_pool_tokens"] = capacity
        session = Session(
            engine, settings, control, deadline=begin + options.seconds, capacity=capacity,
            gpus=options.real_tp, data_parallel=options.real_dp,
        )  # fmt: skip
        session.ask([session.tokens(100)], 4)
        session.collect()
        kept = last_start.kept("start")
        # An engine that the plug-in leaves alone has an earlier engine's.
        result.document["start"] = _start("" if kept == before else kept or "")
        for given in options.tests.split(","):
            name, _, share = given.partition(":")
            session.limit(float(share or 1))
            session.select(None)
            result.run(name, TESTS[name], session, options)
        result.document["gpu_after"] = _gpu()
        result.save()
    finally:
        engine.shutdown()


def _start(kept: str) -> dict[str, Any]:
    """Memory of the GPUs after a first answer, and what took the plug-in's seconds on rank 0."""
    used = _said("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    found: dict[str, Any] = {"used_mib": [int(mib) for mib in used.split()] or [0]}
    for total, parts, own in re.findall(r"took (\S+) s of this start \((.*)\); .* (\S+) s$", kept):
        took = dict(part.rsplit(" ", 1) for part in parts.split(", "))
        took |= {"the plug-in in all": total, ENGINE: own}
        found["by_rank"] = [{what: float(seconds) for what, seconds in took.items()}]
    return found


def _capacity(engine: Any, asked: int) -> int:
    """Tokens in the KV pool: as many as were asked for, or fewer."""
    started = getattr(engine, "_scheduler_init_result", None)
    infos = getattr(started, "scheduler_infos", None) or [{}]
    return int(infos[0].get("max_total_num_tokens") or asked)


def _head(
    options: argparse.Namespace, configurations: tuple[Configuration, ...], start: Configuration
) -> dict[str, Any]:
    return {
        "label": options.label or _label(options),
        "kv_dtype": KV_DTYPES[options.kv],
        "configurations": dumped(configurations),
        "started_as": start.name,
        "options": json.loads(json.dumps(vars(options), default=str, sort_keys=True)),
        "engine": {"name": "sglang"},
        "versions": _versions(),
        "gpu": _gpu(),
        "nsa_tune": {"commit": options.commit or _commit(), "sources": _digest()},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_OWN_VARIABLES)},
    }


def _label(options: argparse.Namespace) -> str:
    parts = [options.model] if options.model != "deepseek-v3.2" else []
    parts += [KV_DTYPES[options.kv], f"{options.heads} heads", f"{options.layers} layers"]
    parts += [f"MTP {options.spec}"] if options.spec else []
    parts += [f"{options.real_tp} GPUs"] if options.real_tp > 1 else []
    return ", ".join(parts)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _gpu() -> dict[str, str]:
    fields = ("name", "driver_version", "memory.total", "memory.used", "clocks.max.sm")
    lines = _said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    values = lines.splitlines()[0].split(", ") if lines else []
    return dict(zip(fields, values, strict=False))


def _commit() -> str:
    return _said("git", "-C", str(_ROOT), "rev-parse", "HEAD")


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _digest() -> str:
    """Of the package's sources: it names what ran where there is no git."""
    digest = hashlib.sha256()
    for path in sorted((_ROOT / "nsa_tune").rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # SGLang leaves threads behind that would hold the process open.
    os._exit(code)
