"""Which of several tables fits this machine, and in what a table differs from what was asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from nsa_tune._errors import StoreError
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.libraries import PROVIDERS
from nsa_tune.backend.types.records import OVERLAP, Key, StoredTable, Table
from nsa_tune.db import places, search
from nsa_tune.db import reader as tables

# Older tables have rows of a kernel in TileLang.
_OPTIONAL = {"tilelang"} | {
    distribution
    for library in PROVIDERS.values()
    if library.optional
    for distribution, _ in library.sources
}


@dataclass(frozen=True, slots=True)
class Here:
    """What this machine would add to a key."""

    driver: str
    libraries: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, gpu: str) -> Here | None:
        """This machine's part of the key for `gpu`, or None when it has no such device."""
        if gpu in nvml.gpu_names():
            return cls(detect.driver_version(), detect.library_versions())
        if gpu.startswith("CPU") and gpu == detect.cpu_name():
            return cls("", detect.library_versions())
        return None


def differing(table: Table, here: Here | None) -> list[str]:
    """ "field: measured with X, here Y" for all that the key has and this machine has not."""
    if here is None:
        return []
    local = replace(table.key, driver=here.driver, libraries=here.libraries)
    return [
        f"{name}: measured with {theirs or 'none'}, here {ours or 'none'}"
        for name, ours, theirs in local.differences(table.key)
        # Measured without the library that some arms need, a table has no times of these arms.
        if not (name in _OPTIONAL and theirs == "absent")
    ]


def in_order(
    db: Path | None, wanted: tables.Wanted, here: Here | None, failed: Collection[str] = ()
) -> Iterator[StoredTable]:
    """The tables that are `wanted`, best first: those of one source after the other. At last come
    those whose digests `failed` a check, or that hold only where queries share as much as they did.

    Raises:
        StoreError: when `db` is given and cannot be read.
    """
    demoted: list[StoredTable] = []
    for found in search.find(db, wanted):
        # Those of exactly this driver and these libraries before the rest.
        for table in sorted(found, key=lambda stored: bool(differing(stored.head, here))):
            key = table.head.key
            if OVERLAP in key.protocol or (failed and key.digest in failed):
                demoted.append(table)
            else:
                yield table
    yield from demoted


def of_the_same_architecture(
    db: Path | None, wanted: tables.Wanted, arch: str
) -> Iterator[StoredTable]:
    """Tables of other GPUs with this architecture, and else all that is `wanted`."""
    fields = ("model", "heads", "kv_layout")
    others = [
        key.gpu
        for _, key in _keys(db, wanted)
        if key.gpu != wanted.gpu
        and all(getattr(key, name) == getattr(wanted, name) for name in fields)
    ]
    for gpu in dict.fromkeys(others):
        try:
            found = chain.from_iterable(search.find(db, wanted._replace(gpu=gpu), wanted))
            yield from (table for table in found if table.head.device.arch == arch)
        except StoreError:
            continue


def nothing_for(db: Path | None, wanted: tables.Wanted) -> str:
    """One sentence: nothing is tuned for `wanted`, and what the nearest table differs in."""
    asked = (
        f"nothing is tuned for {wanted.model} with {wanted.heads} local heads and KV layout "
        f"{wanted.kv_layout} on {wanted.gpu!r}"
    )
    nearest = [(_differences(key, wanted), source) for source, key in _keys(db, wanted)]
    if not nearest:
        return f"{asked}, nor is there a table for anything else; measure with `nsa-tune run`"
    differences, source = min(nearest, key=lambda pair: (len(pair[0]), sorted(pair[0]), pair[1]))
    if not differences:
        return f"{asked}: in {source} no measurement succeeded; measure with `nsa-tune run`"
    words = ", ".join(
        f"{field} ({theirs!r} there)" for field, theirs in sorted(differences.items())
    )
    return f"{asked}; the nearest table, {source}, differs in {words}; measure with `nsa-tune run`"


def _differences(key: Key, wanted: tables.Wanted) -> dict[str, str]:
    asked = replace(key, **wanted._asdict())
    return {field: theirs for field, _, theirs in asked.differences(key)}


def _keys(db: Path | None, wanted: tables.Wanted) -> Iterator[tuple[str, Key]]:
    """(source, key) of every table that can be read; `find` has warned of the others."""
    for path in places.sources(db, wanted):
        with suppress(StoreError):
            name = places.name_of(path) or str(path)
            yield from [(name, key) for key in tables.keys_in(path)]
