"""Whether a plug-in works here: what is hooked, what is not, and why.

Engines only log when a plug-in or a hook fails, and go on without it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nsa_tune._child_process import command, environment
from nsa_tune._errors import StoreError
from nsa_tune.backend.hardware import detect
from nsa_tune.db import places
from nsa_tune.db import reader as tables
from nsa_tune.engines import probe
from nsa_tune.engines.plugin import Plugin
from nsa_tune.engines.switches import OFF_SWITCH, switched_off
from nsa_tune.engines.symbols import Symbol, in_source

NAME = "nsa_tune"
"""The entry point, in every engine's group."""
_PROBE_SECONDS = 300


class Health(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def health(plugin: Plugin, *, db: Path | None = None) -> list[Health]:
    """Everything that must be right for the plug-in to steer its engine on this machine.

    A process imports the engine's attention backend and looks at its hooks: that takes seconds, and
    is the only check that sees what really happens.
    """
    name, version = plugin.releases.distribution, plugin.releases.installed_version()
    if version is None:
        text = (
            f"{plugin.engine} is not installed in this environment: install nsa-tune into the one "
            "that the engine runs in, and run the same command there"
        )
        return [Health(name, False, text)]
    symbols = plugin.symbols()
    known = f"the plug-in was checked with {plugin.releases.checked()}"
    return [
        Health(name, symbols is not None, f"{plugin.engine} {version}; {known}"),
        _entry_point(plugin),
        _allowed(plugin),
        _switch(),
        _table(db),
        *(_source(plugin, symbol) for symbol in symbols or ()),
        *(_hooks(plugin, symbols) if symbols else ()),
    ]


def _entry_point(plugin: Plugin) -> Health:
    points = [point for point in metadata.entry_points(group=plugin.group) if point.name == NAME]
    if points:
        return Health("entry point", True, f"{plugin.group}: {NAME} = {points[0].value}")
    text = (
        f"the group {plugin.group} has no {NAME}: install nsa-tune where {plugin.engine} is "
        "installed"
    )
    return Health("entry point", False, text)


def _allowed(plugin: Plugin) -> Health:
    names = [
        name.strip() for name in os.environ.get(plugin.allow_list, "").split(",") if name.strip()
    ]
    if not names or NAME in names:
        return Health("allowed", True, f"{plugin.allow_list} lets {NAME} load")
    return Health("allowed", False, f"{plugin.allow_list}={','.join(names)} leaves {NAME} out")


def _switch() -> Health:
    if switched_off():
        return Health("switch", False, f"{OFF_SWITCH} is set, so nothing is hooked")
    return Health("switch", True, f"{OFF_SWITCH} is not set")


def _table(db: Path | None) -> Health:
    gpu = detect.local_device_name()
    measured: set[str] = set()
    for path in places.sources(db):
        try:
            keys = tables.keys_in(path)
        except StoreError:
            continue  # the doctor's own check of the database says more
        measured |= {
            f"{key.model} with {key.heads} local heads and {key.kv_layout} KV"
            for key in keys
            if key.gpu == gpu
        }
    if not measured:
        return Health("table", False, f"nothing is measured for {gpu!r}: run `nsa-tune run`")
    return Health("table", True, f"{gpu}: {'; '.join(sorted(measured))}")


def _source(plugin: Plugin, symbol: Symbol) -> Health:
    """Whether the installed source has the symbol; nothing is imported."""
    ok, detail = in_source(plugin.releases.distribution, symbol)
    return Health(f"source of {symbol.name}", ok, detail)


def _hooks(plugin: Plugin, symbols: Sequence[Symbol]) -> Iterator[Health]:
    outcome, why = _probed(plugin)
    for symbol in symbols:
        count = outcome.get("hooks", {}).get(symbol.name) or 0
        if count == 1:
            detail = f"{symbol.target} is hooked"
        elif count > 1:
            detail = f"{symbol.target} is hooked {count} times"
        else:
            reasons = dict.fromkeys(outcome.get("log", []))
            because = "; ".join(reasons) or why or f"{plugin.engine} did not load the plug-in"
            detail = f"{symbol.target} is not hooked: {because}"
        yield Health(f"hook on {symbol.name}", count == 1, detail)


def _probed(plugin: Plugin) -> tuple[dict[str, Any], str]:
    """What the probe wrote, or why it wrote nothing."""
    try:
        done = subprocess.run(
            command(probe.__name__, plugin.releases.distribution), capture_output=True, text=True,
            timeout=_PROBE_SECONDS, check=False, env=environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return {}, f"the process that imports {plugin.engine} failed: {error}"
    lines = done.stdout.splitlines()
    try:
        return dict(json.loads(lines[-1])), ""
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        return {}, f"the process that imports {plugin.engine} ended with {done.returncode}: {last}"
