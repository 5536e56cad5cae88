"""Whether the plug-in works here: what is hooked, what is not, and why.

SGLang only logs when a plug-in or a hook fails, and goes on without it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nsa_tune._errors import StoreError
from nsa_tune.backend.engines.hooking import OFF_SWITCH, switched_off
from nsa_tune.backend.engines.sglang.pass_mode import remembered
from nsa_tune.backend.engines.sglang.pass_mode.summary import summary
from nsa_tune.backend.engines.sglang.releases import (
    Release,
    checked,
    installed_version,
    release_of,
)
from nsa_tune.backend.engines.symbols import Symbol
from nsa_tune.backend.hardware import detect
from nsa_tune.db import reader as tables
from nsa_tune.db import text_table

__all__ = ["GROUP", "PLUGIN", "Health", "health"]

GROUP = "sglang.srt.plugins"
PLUGIN = "nsa_tune"
_ALLOWED = "SGLANG_PLUGINS"
_PROBE_SECONDS = 300


class Health(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def health(*, db: Path | None = None, probe: bool = True) -> list[Health]:
    """Everything that must be right for the plug-in to steer SGLang on this machine.

    With `probe` a process imports the engine's attention backend and looks at its hooks: that
    takes seconds, and is the only check that sees what really happens.
    """
    version = installed_version()
    if version is None:
        return [Health("sglang", False, "SGLang is not installed in this environment")]
    release = release_of(version)
    known = f"the plug-in was checked with {checked()}"
    found = [Health("sglang", release is not None, f"SGLang {version}; {known}")]
    found += [_entry_point(), _allowed(), _switch(), _table(db)]
    if release is not None:
        found += map(_source, release.symbols)
        if any(symbol.name == "forward" for symbol in release.symbols):
            found += _pass_times()
        if probe:
            found += _hooks(release)
    return found


def _entry_point() -> Health:
    points = [one for one in metadata.entry_points(group=GROUP) if one.name == PLUGIN]
    if points:
        return Health("entry point", True, f"{GROUP}: {PLUGIN} = {points[0].value}")
    text = f"the group {GROUP} has no {PLUGIN}: install nsa-tune where SGLang is installed"
    return Health("entry point", False, text)


def _allowed() -> Health:
    names = [name.strip() for name in os.environ.get(_ALLOWED, "").split(",") if name.strip()]
    if not names or PLUGIN in names:
        return Health("allowed", True, f"{_ALLOWED} lets {PLUGIN} load")
    return Health("allowed", False, f"{_ALLOWED}={','.join(names)} leaves {PLUGIN} out")


def _switch() -> Health:
    if switched_off():
        return Health("switch", False, f"{OFF_SWITCH} is set, so nothing is hooked")
    return Health("switch", True, f"{OFF_SWITCH} is not set")


def _table(db: Path | None) -> Health:
    gpu = detect.local_device_name()
    found: list[str] = []
    for path in tables.sources(db):
        try:
            keys = (
                [text_table.read_key(path)]
                if path.suffix == ".tsv"
                else [table.key for table in tables.read_database(path)]
            )
        except StoreError:
            continue  # the doctor's own check of the database says more
        found += [
            f"{key.model} with {key.heads} local heads and {key.kv_layout} KV"
            for key in keys
            if key.gpu == gpu
        ]
    if not found:
        return Health("table", False, f"nothing is measured for {gpu!r}: run `nsa-tune run`")
    return Health("table", True, f"{gpu}: {'; '.join(sorted(set(found)))}")


def _pass_times() -> list[Health]:
    """What was measured of whole passes at earlier starts; nothing need be there."""
    kept = [Health("pass times", True, summary(times)) for times in remembered.remembered()]
    none = "none are remembered yet: SGLang measures them when it starts"
    return kept or [Health("pass times", True, none)]


def _source(symbol: Symbol) -> Health:
    """Whether the installed source has the symbol; nothing is imported."""
    name = f"source of {symbol.name}"
    path = _file_of(symbol.module)
    if path is None:
        return Health(name, False, f"SGLang has no module {symbol.module}")
    wanted, method = symbol.path.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == method:
                    arguments = tuple(arg.arg for arg in (*one.args.args, *one.args.kwonlyargs))
                    given = f"{symbol.path}({', '.join(arguments)})"
                    return Health(name, symbol.accepts(arguments), given)
    return Health(name, False, f"{symbol.module} has no {symbol.path}")


def _file_of(module: str) -> Path | None:
    inside = Path(*module.split(".")).with_suffix(".py")
    for file in metadata.files("sglang") or ():
        if Path(file) == inside:
            return Path(str(file.locate()))
    # An editable installation lists none of its files.
    for folder in sys.path:
        if (Path(folder) / inside).is_file():
            return Path(folder) / inside
    return None


def _hooks(release: Release) -> Iterator[Health]:
    found, why = _probed()
    for symbol in release.symbols:
        count = found.get("hooks", {}).get(symbol.name) or 0
        if count == 1:
            detail = f"{symbol.target} is hooked"
        elif count > 1:
            detail = f"{symbol.target} is hooked {count} times"
        else:
            reasons = dict.fromkeys(found.get("log", []))
            because = "; ".join(reasons) or why or "SGLang did not load the plug-in"
            detail = f"{symbol.target} is not hooked: {because}"
        yield Health(f"hook on {symbol.name}", count == 1, detail)


def _probed() -> tuple[dict[str, Any], str]:
    """What the probe wrote, or why it wrote nothing."""
    command = [sys.executable, "-m", f"{__package__}.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {}, f"the process that imports SGLang failed: {error}"
    lines = done.stdout.splitlines()
    try:
        return dict(json.loads(lines[-1])), ""
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        return {}, f"the process that imports SGLang ended with {done.returncode}: {last}"
