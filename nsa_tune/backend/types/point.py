"""What a decision point is: arms, features, guards and a baseline, declared in one place.

The declarations load the standard library only. An arm's `build` imports torch and its kernel
library when it is called, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nsa_tune._errors import UnknownName

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.types.batch import Batch, Mode
    from nsa_tune.backend.types.layouts import KVLayout
    from nsa_tune.backend.types.profiles import ModelProfile
    from nsa_tune.backend.types.records import Device

__all__ = ["ANY_GPU", "Answer", "Arm", "Case", "Guard", "Point", "Setting"]

ANY_GPU = frozenset(
    {"sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"}
)
"""Architectures that have bf16 tensor cores, for kernels that are compiled where they run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything besides the batch that an answer depends on."""

    profile: ModelProfile
    heads: int
    """Local heads."""
    layout: KVLayout
    device: Device
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Distribution name to version, as installed where the table was measured."""
    max_chunk_kv: int = 131072
    """Most kv tokens that the engine expands at once for MHA (SGLANG_MAX_KV_CHUNK_CAPACITY)."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """What `nsa-tune probe` found, by the names in `backend.guards.PROBED`."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A hard limit of an arm. No table overrides it."""

    name: str
    kind: str
    """"formula" (from device and version), "probe" (found by experiment) or "semantic"."""
    source: str
    """Where the limit is written down: file and line, or the rule that it follows from."""
    check: Callable[[Batch, Setting], str | None]
    """One clause that says which limit is passed, or None while the arm is allowed."""


class Case(Protocol):
    """The input tensors of one batch, ready for every arm of a point, and their right answer."""

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a row of `output` against the reference; NaN counts as inf."""
        ...

    @property
    def tolerance(self) -> float:
        """Errors above this make an arm wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer a decision point, timed whole."""

    name: str
    """Unique in its point; the part before "/" is the path where a point has paths."""
    build: Callable[[Any], Callable[[], torch.Tensor]]
    """Takes the point's case, does what happens once a pass on the host, and returns what is
    timed: a call without arguments that launches the whole arm and returns its output."""
    layouts: frozenset[KVLayout]
    requires: str | None = None
    """The provider of its kernels (`backend.providers`); None for plain torch."""
    archs: frozenset[str] | None = None
    """Architectures that its kernels exist for; None runs anywhere."""
    guards: tuple[Guard, ...] = ()
    reference: bool = False
    """Plain torch: timed only where the point has no kernels for the device."""
    terms: tuple[str, ...] | None = None
    """Those of the point's cost terms that its time may depend on; None for all. A fit finds
    weights for whatever it is offered, so an arm is offered no other kernel's work."""
    surcharge_us: Callable[[Batch, Setting], float] | None = None
    """What a batch behind a cliff takes more than the measurements before it tell; 0 before it."""

    def allowed(self, batch: Batch, setting: Setting) -> str | None:
        """Why this arm must not run on `batch`, or None when it may."""
        if setting.layout not in self.layouts:
            return f"{self.name} does not read {setting.layout} pools"
        if self.archs is not None and setting.device.arch not in self.archs:
            return f"{self.name} has no kernels for {setting.device.arch}"
        for guard in self.guards:
            reason = guard.check(batch, setting)
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True, slots=True)
class Answer:
    """One question that a point's measurements answer: each choice costs its best allowed arm."""

    name: str
    """The name of the field in a `Plan`."""
    choices: Mapping[str, tuple[str, ...]]
    """Choice to the arms that realise it. On a tie the earlier choice is the stable default."""


def _itself(sheet: int) -> int:
    return sheet


@dataclass(frozen=True, slots=True)
class Point:
    """A decision point."""

    name: str
    modes: frozenset[Mode]
    arms: tuple[Arm, ...]
    answers: tuple[Answer, ...]
    terms: tuple[str, ...]
    """Names of what `cost_terms` returns."""
    cost_terms: Callable[[Batch, Setting], tuple[float, ...]]
    """Amounts of work that an arm's time is a sum of, with weights of its own: tokens, pairs."""
    coordinates: tuple[str, ...]
    """Names of what `locate` returns."""
    locate: Callable[[Batch, Setting], tuple[float, ...]]
    """Where a batch lies, in log2 of its features, for interpolating between measurements."""
    sheet: Callable[[Batch, Setting], int]
    """Batches on different sheets do work of a different kind and never share a surface."""
    grid: Callable[[Setting], list[Batch]]
    """The default sweep, coarse batches first, so that a part of it is already usable."""
    case: Callable[[Batch, Setting, torch.device], Case]
    """The input tensors of a batch on a device. Imports torch."""
    sample: Callable[[Setting, Any], Batch]
    """A random batch from `random.Random`, for held-out checks: ragged half of the time."""
    families: frozenset[str] = frozenset({"dsa"})
    """Families of models that the question arises in."""
    term_bounds: Callable[[Batch, Setting], tuple[tuple[float, float] | None, ...]] | None = None
    """For each of `terms`, by a batch's sums, the least and the most that it may be, in sums and
    products of two sums; None for one that needs no such bounds."""
    kin: Callable[[int], int] = _itself
    """A number that sheets share whose batches differ in size only: what fails on a batch of one
    fails on the bigger ones of all."""
    group: str = ""
    """A name for several points of one file, which may stand for all of them."""

    def arm(self, name: str) -> Arm:
        """The arm called `name`.

        Raises:
            UnknownName: when the point has no such arm.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UnknownName.of(f"arm of {self.name}", name, [arm.name for arm in self.arms])

    def columns_of(self, arm: str) -> tuple[int, ...]:
        """Which of `terms`, by number, the time of `arm` may depend on."""
        own = self.arm(arm).terms
        return tuple(i for i, name in enumerate(self.terms) if own is None or name in own)

    def candidates(self, setting: Setting) -> Iterator[Arm]:
        """The arms worth timing in this setting: all that the device has kernels for.

        Reference arms are among them only where there are no kernels at all: timed against a
        kernel, plain torch would speak for a library that is not there.
        """
        fits = [
            arm
            for arm in self.arms
            if setting.layout in arm.layouts
            and (arm.archs is None or setting.device.arch in arm.archs)
        ]
        kernels = [arm for arm in fits if not arm.reference]
        yield from kernels or fits
