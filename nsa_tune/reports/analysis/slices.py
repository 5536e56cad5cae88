"""Slices of the measured batches: equal sequences, and only one length varies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from nsa_tune.backend.types.batch import Batch, Mode

AXES = {
    Mode.EXTEND: ("new", "prefix", "sequences"),
    Mode.DECODE: ("sequences", "context", "next_n"),
    Mode.TARGET_VERIFY: ("sequences", "context", "next_n"),
    Mode.DRAFT_EXTEND: ("sequences", "context", "next_n"),
}
"""The lengths that define a batch of equal sequences. A slice runs along the first that varies."""

UNITS = {
    "new": "new tokens",
    "prefix": "prefix tokens",
    "sequences": "sequences",
    "context": "context tokens",
    "next_n": "new tokens each",
}
"""The unit of each length."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Batches that differ in one length, the axis."""

    mode: Mode
    axis: str
    fixed: tuple[tuple[str, int], ...]
    """The other lengths. The first is the one that charts group by."""
    values: tuple[int, ...]
    """Measured values of the axis, ascending."""

    @property
    def label(self) -> str:
        """The fixed lengths: ``4 sequences, prefix 1024``. One sequence is not mentioned."""
        return ", ".join(
            f"{value} sequences" if name == "sequences" else f"{name} {value}"
            for name, value in self.fixed
            if (name, value) != ("sequences", 1)
        )

    @property
    def unit(self) -> str:
        """What the axis counts: ``new tokens``."""
        several = self.axis == "new" and dict(self.fixed)["sequences"] > 1
        return f"{UNITS[self.axis]} each" if several else UNITS[self.axis]

    def amount(self, value: int) -> str:
        """`value` with its unit: ``310 new tokens``, ``1 sequence``."""
        unit = self.unit
        if value == 1:
            unit = unit.replace("tokens", "token").replace("sequences", "sequence")
        return f"{value} {unit}"

    def batch(self, value: int) -> Batch:
        """The batch at `value` of the axis, measured or not."""
        return _batch_of(self.mode, (*self.fixed, (self.axis, value)))


@lru_cache(maxsize=2**12)  # every question of a point asks for the same batches
def _batch_of(mode: Mode, named: tuple[tuple[str, int], ...]) -> Batch:
    lengths = dict(named)
    count = lengths["sequences"]
    if mode is Mode.EXTEND:
        return Batch.extend([lengths["prefix"]] * count, [lengths["new"]] * count)
    contexts = [lengths["context"]] * count
    if mode is Mode.DECODE:
        return Batch.decode(contexts)
    make = Batch.verify if mode is Mode.TARGET_VERIFY else Batch.draft_extend
    return make(contexts, lengths["next_n"])


def lengths_of(batch: Batch) -> dict[str, int] | None:
    """The lengths of a batch by the names in `AXES`; None if its sequences differ."""
    if batch.lens is None or len(set(batch.lens)) != 1:
        return None
    prefix, new = batch.lens[0]
    if batch.mode is Mode.EXTEND:
        return {"sequences": batch.batch_size, "prefix": prefix, "new": new}
    return {"next_n": batch.next_n, "context": prefix + new, "sequences": batch.batch_size}


def slices_of(batches: Iterable[Batch]) -> list[Slice]:
    """The slices with at least two measured batches, along the first axis that varies."""
    modes: dict[Mode, list[dict[str, int]]] = defaultdict(list)
    for batch in batches:
        lengths = lengths_of(batch)
        if lengths is not None:
            modes[batch.mode].append(lengths)
    lines: list[Slice] = []
    for mode, members in modes.items():
        for axis in AXES[mode]:
            found = _along(mode, axis, members)
            if found:
                lines += found
                break
    return lines


def _along(mode: Mode, axis: str, members: list[dict[str, int]]) -> list[Slice]:
    groups: dict[tuple[tuple[str, int], ...], set[int]] = defaultdict(set)
    for lengths in members:
        fixed = tuple((name, value) for name, value in lengths.items() if name != axis)
        groups[fixed].add(lengths[axis])
    return [
        Slice(mode, axis, fixed, tuple(sorted(values)))
        for fixed, values in sorted(groups.items())
        if len(values) > 1
    ]
