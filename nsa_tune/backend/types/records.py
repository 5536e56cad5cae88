"""Records that travel between the tuner, the store, the policy and the reports."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from math import log
from typing import Any, NamedTuple

OVERLAP = " overlap "
"""Behind it a protocol's name has the share of their keys that neighbouring queries share."""


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of one device that the guards and the timing need. Sizes are bytes."""

    name: str
    """As the driver reports it ("NVIDIA H100 80GB HBM3"), or "CPU " and the processor's name."""
    arch: str
    """"sm90", "sm100", ... or "cpu"."""
    sms: int = 0
    shared_memory_optin: int = 0
    """cudaDevAttrMaxSharedMemoryPerBlockOptin: what one block may ask for, not one SM's whole."""
    memory: int = 0
    l2: int = 0


@dataclass(frozen=True, slots=True)
class Key:
    """What a table of measurements is valid for. Two keys that differ anywhere do not mix."""

    gpu: str
    driver: str
    libraries: tuple[tuple[str, str], ...]
    """(distribution, version), sorted: torch and every kernel library that answered."""
    model: str
    heads: int
    """Local heads."""
    kv_layout: str
    protocol: str
    """Name and version of the timing protocol: numbers of two protocols do not compare."""

    @property
    def digest(self) -> str:
        """16 hex digits that name this key in a database; frozen by a test."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_document(self) -> dict[str, Any]:
        """The fields as JSON documents have them: libraries as an object, names to versions."""
        return {**asdict(self), "libraries": dict(self.libraries)}

    def differences(self, other: Key) -> Iterator[tuple[str, str, str]]:
        """(field, ours, theirs) for each field, library by library, where `other` differs."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "libraries":
                mine, yours = dict(ours), dict(theirs)
                for name in sorted(mine.keys() | yours.keys()):
                    if mine.get(name) != yours.get(name):
                        yield name, mine.get(name, "absent"), yours.get(name, "absent")
            elif ours != theirs:
                yield field.name, str(ours), str(theirs)


class Status(StrEnum):
    """How an arm's measurement ended."""

    OK = "ok"
    FAILED = "failed"
    """It raised, or its library is missing."""
    WRONG = "wrong"
    """Its output was not the reference's."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One arm on one batch. Latencies are microseconds of the whole arm in one layer."""

    point: str
    batch: str
    """`str(Batch)`."""
    arm: str
    status: Status
    latency_us: float | None = None
    """Median over the samples."""
    low_us: float | None = None
    high_us: float | None = None
    """95 % interval of the median."""
    samples: int = 0
    error: float | None = None
    """Largest relative error of an output row against the reference."""
    reason: str = ""
    """Why it failed, in one line; empty when it did not."""
    discarded: int = 0
    """Samples thrown away because the device was slowed down. Not in a table's text form."""
    pass_us: float | None = None
    """What the arm takes once a pass, before its first layer, for all layers together: a schedule,
    say. None where nothing is shared, or where it was not measured apart."""

    @property
    def noise(self) -> float:
        """Half the width of the time's interval, as a logarithm."""
        assert self.latency_us is not None
        low, high = self.low_us or self.latency_us, self.high_us or self.latency_us
        return max(log(high / self.latency_us), log(self.latency_us / low), 0.0)

    def amortised(self, layers: int) -> Measurement:
        """The same with each layer's share of the pass in its times."""
        if not self.pass_us or self.latency_us is None:
            return self
        share = self.pass_us / layers
        return dataclasses.replace(
            self,
            latency_us=self.latency_us + share,
            low_us=None if self.low_us is None else self.low_us + share,
            high_us=None if self.high_us is None else self.high_us + share,
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Everything measured under one key, and where it was read from."""

    key: Key
    device: Device
    measurements: tuple[Measurement, ...]
    source: str
    """A path, or "shipped:NAME"."""
    measured_at: str = ""
    """ISO 8601, UTC, of the newest measurement."""
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """What probes found under this key."""
    times: Mapping[tuple[str, str, str], str] = dataclasses.field(default_factory=dict)
    """By (point, batch, arm), when it was measured, if that is known and not `measured_at`."""

    def time_of(self, row: Measurement) -> str:
        """When `row` was measured, or at the latest: ISO 8601, UTC."""
        return self.times.get((row.point, row.batch, row.arm), self.measured_at)


class StoredTable(NamedTuple):
    """A table in a file: its head at once, its measurements when they are asked for."""

    head: Table
    """Without measurements."""
    read: Callable[[], Table]
    """Reads the whole table, anew at each call. Raises StoreError when it cannot."""
