"""Whole passes that were measured in an engine: those that ship, and those of the plug-in's starts.

A file is JSON: `schema`, `key` (gpu, engine, version, model, layers, heads, kv_dtype), optional
`graph_sizes` (of prefills; else SGLang's own), `source` (where the figures were published, driver,
torch, date, what was timed) and `passes`, each with the batch, the configuration ("default", a
value of --dsa-prefill-backend, or "plug-in"), the way that it ran (a `PassMode`), and milliseconds:
["extend:8192+1024", "fa3", "engine", 101.0].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nsa_tune
from nsa_tune._errors import NsaTuneError, UsageError
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN, PREFILL_FLAG

_SCHEMA = "nsa-tune/engine-passes/1"
_FOLDER = Path(nsa_tune.__file__).parent / "tables" / "passes"
_MOST_BYTES = 2**20
_SETUPS = {"default": DEFAULT, "plug-in": PLUGIN}
_MALFORMED = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, NsaTuneError)


class EnginePass(NamedTuple):
    """One measured pass."""

    batch: Batch
    setup: str
    way: PassMode
    us: float


@dataclass(frozen=True, slots=True)
class EnginePasses:
    """All measured passes of one engine."""

    key: Mapping[str, Any]
    source: str  # where they come from, in a line
    passes: tuple[EnginePass, ...]
    graph_sizes: tuple[int, ...] = GRAPH_SIZES
    """New tokens for which that engine had prefill graphs."""

    @property
    def layers(self) -> int:
        """Layers of the model that ran."""
        return int(self.key["layers"])

    @classmethod
    def read(cls, path: Path) -> EnginePasses:
        """The passes in a file of either kind; UsageError when it is none."""
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        try:
            document = json.loads(text)
            if document["schema"] == _SCHEMA:
                return _published(document)
            return own_passes(PassTimes.from_text(text), str(path))
        except (RecursionError, *_MALFORMED) as error:
            raise UsageError(f"{path} has no times of passes: {error}") from error


def _published(document: Mapping[str, Any]) -> EnginePasses:
    key, source = dict(document["key"]), document["source"]
    rows = tuple(
        EnginePass(
            Batch.parse(word), _SETUPS.get(setup, f"{PREFILL_FLAG} {setup}"), PassMode(way),
            float(ms) * 1e3,
        )
        for word, setup, way, ms in document["passes"]
    )  # fmt: skip
    if not all(0 < row.us < 1e9 for row in rows) or int(key["layers"]) < 1:
        raise ValueError("a time or a number of layers is out of bounds")
    where = f"{key['engine']} {key['version']}, {key['layers']} layers, {source['page']}"
    sizes = tuple(document.get("graph_sizes", GRAPH_SIZES))
    return EnginePasses(key, f"{len(rows)} passes measured in {where}", rows, sizes)


def own_passes(times: PassTimes, path: str) -> EnginePasses:
    """What the plug-in measured at an engine's start."""
    most = profile_of(str(times.key["model"])).index_topk
    rows = tuple(
        EnginePass(
            time.batch(most), DEFAULT if time.mode in (PassMode.ENGINE, PassMode.EAGER) else PLUGIN,
            time.mode, time.pass_us,
        )
        for time in times.times
    )  # fmt: skip
    key = {"engine": "sglang", "version": times.key.get("sglang", "unknown"), **times.key}
    sizes: Any = times.key.get("prefill_sizes") or GRAPH_SIZES
    source = f"{len(rows)} passes that the plug-in measured ({path})"
    return EnginePasses(key, source, rows, tuple(map(int, sizes)))


def passes_for(setting: Setting, given: Path | None = None) -> EnginePasses | None:
    """The measured passes that fit a setting best: of a given file; of this machine's starts; of
    published figures, as many layers as possible and all releases, as hosts differ more than these;
    of a start that ships. Where they have no decode passes, with published ones. None where there
    are none. UsageError when the given file is none, or of another engine.
    """
    published = _published_for(setting)
    measured = _measured_for(setting, given, published)
    if measured is None or published is None or measured.layers != published.layers:
        return measured
    if any(row.batch.mode is not Mode.EXTEND for row in measured.passes):
        return measured
    decodes = tuple(row for row in published.passes if row.batch.mode is not Mode.EXTEND)
    return replace(measured, passes=measured.passes + decodes)


def _measured_for(
    setting: Setting, given: Path | None, published: EnginePasses | None
) -> EnginePasses | None:
    if given is not None:
        measured = EnginePasses.read(given)
        if differences := _differences(setting, measured.key):
            raise UsageError(f"{given} is of another engine: {differences}")
        return measured
    kept = remembered.newest(lambda key: not _differences(setting, key, layers=True))
    if kept is None or (published is not None and kept[0].parent == remembered.SHIPPED):
        return published
    return EnginePasses.read(kept[0])


def _published_for(setting: Setting) -> EnginePasses | None:
    fitting = [passes for passes in shipped_passes() if not _differences(setting, passes.key)]
    if not fitting:
        return None
    layers = min((p.layers for p in fitting), key=lambda layers: abs(layers - setting.sharing))
    alike = [passes for passes in fitting if passes.layers == layers]
    rows = tuple(row for passes in alike for row in passes.passes)
    return replace(alike[-1], source="; ".join(p.source for p in alike), passes=rows)


@cache
def shipped_passes() -> tuple[EnginePasses, ...]:
    """All of published figures, the newest release of an engine last."""
    return tuple(map(EnginePasses.read, sorted(_FOLDER.glob("*.json"))))


def _differences(setting: Setting, key: Mapping[str, object], *, layers: bool = False) -> str:
    """Which fields of a key are not those of the setting."""
    wanted: dict[str, object] = {
        "gpu": setting.device.name,
        "model": setting.profile.name,
        "heads": setting.heads,
        "kv_dtype": "bf16" if setting.layout is KVLayout.BF16 else "fp8",
    }
    if layers:
        # Of data-parallel ranks, whose passes wait for each other, other things were measured.
        wanted |= {"layers": setting.sharing, "dp_attention": 1, "draft_tokens": None}
    fields: Mapping[str, object] = {"dp_attention": 1, **key}
    return ", ".join(
        f"{name} is {fields.get(name)!r} and not {value!r}"
        for name, value in wanted.items()
        if fields.get(name) != value
    )
