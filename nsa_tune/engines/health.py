"""Whether a plug-in works here: what is hooked, what is not, and why.

Engines only log when a plug-in or a hook fails, and go on without it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nsa_tune._child_process import command, environment
from nsa_tune._errors import StoreError
from nsa_tune.backend.hardware import detect
from nsa_tune.db import reader as tables
from nsa_tune.engines.hooking import OFF_SWITCH, switched_off
from nsa_tune.engines.symbols import Symbol

PLUGIN = "nsa_tune"
"""The entry point, in every engine's group."""
_PROBE_SECONDS = 300


class Health(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Host:
    """An engine as its plug-in finds it installed."""

    engine: str
    """Its name, as it is written in a sentence."""
    distribution: str
    group: str
    """The group of entry points that it loads plug-ins from."""
    allow_list: str
    """The environment variable that names the plug-ins that may load."""
    version: str | None
    """None where it is not installed."""
    checked: str
    """The versions that the plug-in knows, in words."""
    symbols: Sequence[Symbol] | None
    """What is hooked in this version; None where the plug-in does not know it."""
    probe: str
    """The module that loads the plug-ins as the engine does, and tells what came of it."""


def health(host: Host, *, db: Path | None = None, probe: bool = True) -> list[Health]:
    """Everything that must be right for the plug-in to steer the engine on this machine.

    With `probe` a process imports the engine's attention backend and looks at its hooks: that
    takes seconds, and is the only check that sees what really happens.
    """
    name, version = host.distribution, host.version
    if version is None:
        text = (
            f"{host.engine} is not installed in this environment: install nsa-tune into the one "
            "that the engine runs in, and run the same command there"
        )
        return [Health(name, False, text)]
    known = f"the plug-in was checked with {host.checked}"
    found = [Health(name, host.symbols is not None, f"{host.engine} {version}; {known}")]
    found += [_entry_point(host), _allowed(host), _switch(), _table(db)]
    if host.symbols is not None:
        found += [_source(host, symbol) for symbol in host.symbols]
        if probe:
            found += _hooks(host, host.symbols)
    return found


def _entry_point(host: Host) -> Health:
    points = [one for one in metadata.entry_points(group=host.group) if one.name == PLUGIN]
    if points:
        return Health("entry point", True, f"{host.group}: {PLUGIN} = {points[0].value}")
    text = (
        f"the group {host.group} has no {PLUGIN}: install nsa-tune where {host.engine} is installed"
    )
    return Health("entry point", False, text)


def _allowed(host: Host) -> Health:
    names = [
        name.strip() for name in os.environ.get(host.allow_list, "").split(",") if name.strip()
    ]
    if not names or PLUGIN in names:
        return Health("allowed", True, f"{host.allow_list} lets {PLUGIN} load")
    return Health("allowed", False, f"{host.allow_list}={','.join(names)} leaves {PLUGIN} out")


def _switch() -> Health:
    if switched_off():
        return Health("switch", False, f"{OFF_SWITCH} is set, so nothing is hooked")
    return Health("switch", True, f"{OFF_SWITCH} is not set")


def _table(db: Path | None) -> Health:
    gpu = detect.local_device_name()
    found: list[str] = []
    for path in tables.sources(db):
        try:
            keys = tables.keys_in(path)
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


def _source(host: Host, symbol: Symbol) -> Health:
    """Whether the installed source has the symbol; nothing is imported."""
    name = f"source of {symbol.name}"
    path = _file_of(host.distribution, symbol.module)
    if path is None:
        return Health(name, False, f"{host.engine} has no module {symbol.module}")
    method = _defined(ast.parse(path.read_text(encoding="utf-8")), symbol.path.split("."))
    if isinstance(method, ast.FunctionDef):
        arguments = tuple(arg.arg for arg in _arguments(method.args))
        given = f"{symbol.path}({', '.join(arguments)})"
        return Health(name, symbol.accepts(arguments), given)
    return Health(name, False, f"{symbol.module} has no {symbol.path}")


def _defined(tree: ast.Module, path: Sequence[str]) -> ast.AST | None:
    """The class, method or function called `path` at the top of a module."""
    found: ast.AST = tree
    for name in path:
        inside = [
            node
            for node in getattr(found, "body", ())
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if not inside:
            return None
        found = inside[-1]
    return found


def _arguments(given: ast.arguments) -> Iterator[ast.arg]:
    yield from given.args
    if given.vararg is not None:
        yield given.vararg
    yield from given.kwonlyargs
    if given.kwarg is not None:
        yield given.kwarg


def _file_of(distribution: str, module: str) -> Path | None:
    inside = Path(*module.split(".")).with_suffix(".py")
    for file in metadata.files(distribution) or ():
        if Path(file) == inside:
            return Path(str(file.locate()))
    # An editable installation lists none of its files.
    for folder in sys.path:
        if (Path(folder) / inside).is_file():
            return Path(folder) / inside
    return None


def _hooks(host: Host, symbols: Sequence[Symbol]) -> Iterator[Health]:
    found, why = _probed(host)
    for symbol in symbols:
        count = found.get("hooks", {}).get(symbol.name) or 0
        if count == 1:
            detail = f"{symbol.target} is hooked"
        elif count > 1:
            detail = f"{symbol.target} is hooked {count} times"
        else:
            reasons = dict.fromkeys(found.get("log", []))
            because = "; ".join(reasons) or why or f"{host.engine} did not load the plug-in"
            detail = f"{symbol.target} is not hooked: {because}"
        yield Health(f"hook on {symbol.name}", count == 1, detail)


def _probed(host: Host) -> tuple[dict[str, Any], str]:
    """What the probe wrote, or why it wrote nothing."""
    try:
        done = subprocess.run(
            command(host.probe), capture_output=True, text=True, timeout=_PROBE_SECONDS,
            check=False, env=environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return {}, f"the process that imports {host.engine} failed: {error}"
    lines = done.stdout.splitlines()
    try:
        return dict(json.loads(lines[-1])), ""
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        return {}, f"the process that imports {host.engine} ended with {done.returncode}: {last}"
