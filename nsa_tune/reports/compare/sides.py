"""The two sides of a comparison: which tables each has, and which pairs to compare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.reader import tables_in
from nsa_tune.db.runs import run_table
from nsa_tune.reports.analysis.selection import TableFilter

_RUN = "run:"
_NUMBER = re.compile("[0-9]{1,18}")
"""What SQLite may have as the number of a row."""


def side_of(word: str, wanted: TableFilter) -> list[Table]:
    """The tables that `word` names: FILE, FILE@DIGEST (or the start of it), or FILE@run:N.

    Raises:
        StoreError: when the file cannot be read.
        NoTunedData: when it has no such table.
        UsageError: when the N of FILE@run:N is not a number.
    """
    path, chosen = _split(word)
    if chosen.startswith(_RUN):
        number = chosen.removeprefix(_RUN)
        if not _NUMBER.fullmatch(number):
            raise UsageError(
                f"{word!r} has no run number; write FILE@run:3, with a number that "
                "`nsa-tune db list --runs` shows"
            )
        found = [table for table in [run_table(path, int(number))] if wanted.matches(table.key)]
    else:
        of_digest = (t for t in tables_in(path, wanted) if t.key.digest.startswith(chosen))
        found = list(of_digest)
    if not found:
        listed = "" if path.suffix == ".tsv" else f"; `nsa-tune db list --db {path}` lists them"
        raise NoTunedData(f"no table of {word} matches{listed}")
    return found


def file_of(word: str) -> Path:
    """The file that `word` names."""
    return _split(word)[0]


def _split(word: str) -> tuple[Path, str]:
    """(file, what follows the @). A file name may have an @ in it."""
    if Path(word).exists() or "@" not in word:
        return Path(word), ""
    name, _, chosen = word.rpartition("@")
    return Path(name), chosen


def pairs_of(
    ours: Sequence[Table], theirs: Sequence[Table], *, across_gpus: bool
) -> list[tuple[Table, Table]]:
    """The pairs of tables with the same model, heads and KV layout (and GPU).

    Raises:
        UsageError: when a side has several tables for one pair, when the GPUs differ and
            `across_gpus` is false, or when the timing protocols differ.
        NoTunedData: when there is no pair.
    """
    left, right = (_by_setting(side, across_gpus) for side in (ours, theirs))
    both = [setting for setting in left if setting in right]
    if not both:
        if not across_gpus and _by_setting(ours, True).keys() & _by_setting(theirs, True).keys():
            gpus = " and ".join(repr(side[0].key.gpu) for side in (ours, theirs))
            raise UsageError(f"the GPUs differ: {gpus}; compare them with --across-gpus")
        kinds = " and ".join(_kind(side[0].key) for side in (ours, theirs))
        raise NoTunedData(f"the sides have no setting in common: {kinds}")
    pairs = [(left[setting], right[setting]) for setting in both]
    for one, other in pairs:
        if one.key.protocol != other.key.protocol:
            raise UsageError(
                f"times under the timing protocols {one.key.protocol} and {other.key.protocol} "
                "cannot be compared"
            )
    return pairs


def _by_setting(side: Sequence[Table], across_gpus: bool) -> dict[tuple[object, ...], Table]:
    found: dict[tuple[object, ...], Table] = {}
    for table in side:
        key = table.key
        setting = (key.model, key.heads, key.kv_layout, "" if across_gpus else key.gpu)
        if setting in found:
            digests = ", ".join(one.key.digest for one in (found[setting], table))
            raise UsageError(
                f"{table.source} has several tables of {_kind(key)}; choose one by FILE@DIGEST, "
                f"with one of the digests {digests}"
            )
        found[setting] = table
    return found


def _kind(key: Key) -> str:
    return f"{key.model} with {key.heads} local heads and {key.kv_layout} on {key.gpu!r}"
