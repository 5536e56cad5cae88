"""What `replay` and `advise --trace` price passes by: a table, and pass times.

Pass times come from a given file, or are the newest that the plug-in has kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.engines.sglang.costs.once import offered
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.releases import Release
from nsa_tune.reports.analysis.selection import TableFilter, select_tables
from nsa_tune.reports.replay.prices import LENT, Pricer, borrowed
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.whole_prefills import WholePrefills


def pricer_for(
    dispatcher: Dispatcher, release: Release, database: Path | None
) -> tuple[Pricer, dict[str, str]]:
    """The pricer of a dispatcher, and for each point that has its times from another table, which.

    Raises:
        NoTunedData: when there is no table to price with.
    """
    if dispatcher.table is None:
        raise NoTunedData(f"there are no times to price with: {dispatcher.source}")
    dispatcher = offered(dispatcher)
    policies = dispatcher.policies
    if all(policies[name].measured for name in LENT if name in policies):
        return Pricer(dispatcher, release), {}
    setting = dispatcher.setting
    wanted = TableFilter(setting.device.name, setting.profile.name)
    lent = borrowed(dispatcher, select_tables(database, wanted))
    words = {
        name: f"{table.source}, which has {table.key.heads} heads and {table.key.kv_layout}; the "
        "indexer's times depend on neither"
        for name, (_, table) in lent.items()
    }
    return Pricer(dispatcher, release, {name: one for name, (one, _) in lent.items()}), words


def whole_prefills(
    given: Sequence[Path],
    pricer: Pricer,
    rest: RestOfPass | None,
    *,
    next_n: int = 1,
    graph_tokens: int | None = None,
) -> WholePrefills | None:
    """What prices whole prefills, by a given file, or by the newest kept one where none is given;
    None where none fits.

    Raises:
        UsageError: when a given file cannot be read, or is none.
    """
    wanted = _wanted(pricer, next_n)
    if given:
        files = ((path, _read(path)) for path in given)
        found = next((one for one in files if _fits(wanted, one[1].key)), None)
    else:
        found = remembered.newest(partial(_fits, wanted))
    if found is None:
        return None
    path, times = found
    version = times.key.get("sglang", "unknown")
    source = f"{path}, SGLang {version}, {len(times.times)} times"
    return WholePrefills(times, pricer, rest, source=source, graph_tokens=graph_tokens)


def refused(given: Sequence[Path], pricer: Pricer, next_n: int = 1) -> UsageError:
    """Why none of the given files is of the engine."""
    wanted = _wanted(pricer, next_n)
    words = (
        f"{path} is of another engine: {_differences(wanted, _read(path).key)}" for path in given
    )
    return UsageError("; ".join(words))


def _read(path: Path) -> PassTimes:
    try:
        return PassTimes.from_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} has no times of passes: {error}") from error


def _wanted(pricer: Pricer, next_n: int) -> dict[str, object]:
    setting = pricer.setting
    return {
        "gpu": setting.device.name,
        "model": setting.profile.name,
        "heads": setting.heads,
        "kv_dtype": kv_dtype_of(setting),
        "layers": setting.sharing,
        "draft_tokens": None if next_n == 1 else next_n,
        # Of data-parallel ranks, whose passes wait for each other, other things were measured.
        "dp_attention": 1,
    }


def _said(key: Mapping[str, object], name: str) -> object:
    """A field of a key. Not every version of the plug-in has written all of them."""
    return key.get(name, 1 if name == "dp_attention" else None)


def kv_dtype_of(setting: Setting) -> str:
    """The format of its KV pool, as flags name it."""
    return "bf16" if setting.layout is KVLayout.BF16 else "fp8"


def _fits(wanted: Mapping[str, object], key: Mapping[str, object]) -> bool:
    return all(_said(key, name) == value for name, value in wanted.items())


def _differences(wanted: Mapping[str, object], key: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} is {_said(key, name)!r} and not {value!r}"
        for name, value in wanted.items()
        if _said(key, name) != value
    )
