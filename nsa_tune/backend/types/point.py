"""What a decision point is: its features, guards and arms, declared in one place.

The declarations load the standard library only. An arm's `build` imports torch and its kernel
library when it is called, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from nsa_tune._errors import StoreCorrupt, UnknownName
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.profiles import ModelProfile, profile_of
from nsa_tune.backend.types.records import Device, Table

if TYPE_CHECKING:
    import torch

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
    """What `nsa-tune probe` found, by the names in `backend.libraries.limits.PROBED`."""
    limits_elsewhere: frozenset[str] = frozenset()
    """Those that were found with another version of their library: they say where not to go, and
    never where one may go."""

    layers: int = 0
    """Layers that share what an arm takes once a pass; 0 stands for the whole model's."""
    missing: frozenset[str] = frozenset()
    """Optional libraries that are not installed where arms are measured: their arms are left
    out."""
    lossy: frozenset[str] = frozenset()
    """Names of the lossy arms that the user asked for, without the path."""
    overlap: float | None = None
    """Where arms are measured: share of its selection that a query of `prefill` has in common with
    the one before it; None for selections drawn one by one."""
    kept: float = 0.0
    """Share of its selection that a query of `prefill` has in common with the one before it beyond
    what two at random have: 0 where arms are measured, in an engine what was seen there."""

    @property
    def sharing(self) -> int:
        """Layers over which the cost of a pass is spread."""
        return self.layers or self.profile.alike

    @classmethod
    def of(cls, table: Table) -> Setting:
        """The setting that `table` was measured in.

        Raises:
            StoreCorrupt: for a KV layout that does not exist, or without a head.
            UnknownName: for a model that does not exist.
        """
        key = table.key
        try:
            layout = KVLayout(key.kv_layout)
        except ValueError:
            text = f"{table.source} has an unknown KV layout {key.kv_layout!r}"
            raise StoreCorrupt(text) from None
        if key.heads < 1:
            raise StoreCorrupt(f"{table.source} is of {key.heads} local heads, which no rank has")
        return cls(
            profile_of(key.model), key.heads, layout, table.device, dict(key.libraries),
            limits=dict(table.limits),
        )  # fmt: skip


Limit: TypeAlias = Callable[[Batch], str | None]
"""Gives one clause that says why an arm must not run on a batch, or None where it may."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A hard limit of an arm. No table overrides it."""

    name: str
    kind: str
    """"formula" (from device and version), "probe" (found by experiment) or "semantic"."""
    source: str
    """Where the limit is written down: file and line, or the rule that it follows from."""
    limit: Callable[[Setting], Limit | str | None]
    """The limit in a setting: a function of the batch, a clause that forbids every batch, or None
    where no batch can pass it."""

    def check(self, batch: Batch, setting: Setting) -> str | None:
        """One clause that says how `batch` passes the limit, or None while the arm is allowed."""
        limit = self.limit(setting)
        return limit(batch) if callable(limit) else limit


class Position(NamedTuple):
    """All that a surface knows of a batch."""

    regime: int
    coordinates: tuple[float, ...]
    """In octaves."""
    features: tuple[float, ...]


class FeatureFunctions(NamedTuple):
    """What the times of a point's arms are computed from, in one setting: functions of a batch."""

    names: tuple[str, ...]
    features: Callable[[Batch], tuple[float, ...]]
    """In the order of `names`; none is negative. Raises ArithmeticError for a batch without a
    query."""
    coordinates: Callable[[Batch], tuple[float, ...]]
    """Where a batch lies, in octaves, for interpolation."""
    regime: Callable[[Batch], int] = lambda batch: 0
    """Batches of different regimes have latency models of their own."""
    some: Callable[[frozenset[str]], Callable[[Batch], tuple[float, ...]]] | None = None
    """`features` in which only those of these names count: others may be 0. None where that saves
    nothing."""

    def position(self, batch: Batch) -> Position:
        """Regime, coordinates and features together.

        Raises:
            ArithmeticError: for a batch without tokens.
        """
        return Position(self.regime(batch), self.coordinates(batch), self.features(batch))

    def by_name(self, batch: Batch) -> dict[str, float]:
        """The features of a batch, by their names."""
        return dict(zip(self.names, self.features(batch), strict=True))

    def columns(self, arm: Arm) -> tuple[int, ...]:
        """Which features, by number, the time of `arm` may depend on."""
        offered = self.names if arm.features is None else arm.features
        return tuple(i for i, name in enumerate(self.names) if name in offered)


class Case(Protocol):
    """The input tensors of one batch, ready for every arm of a point, and their right answer."""

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a row of `output` against the reference; NaN counts as inf."""

    @property
    def tolerance(self) -> float:
        """Errors above this make an arm wrong."""


def case_in(module: str, name: str) -> Callable[..., Case]:
    """`name` of a module below `backend.points`, which loads torch: imported with the first case
    that is made."""

    def make(*given: Any) -> Case:
        case: Case = getattr(import_module(f"nsa_tune.backend.points.{module}"), name)(*given)
        return case

    return make


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation of a decision point's work, timed whole."""

    name: str
    """Unique in its point; the part before "/" is the path where a point has paths."""
    build: Callable[[Any], Callable[[], torch.Tensor]]
    """Takes the point's case and returns what is timed: a call without arguments that launches the
    whole arm in one layer and returns its output. What happens once a pass is done before."""
    layouts: frozenset[KVLayout]
    requires: str | None = None
    """The provider of its kernels (`backend.libraries`); None for plain torch."""
    archs: frozenset[str] | None = None
    """Architectures that its kernels exist for; None runs anywhere."""
    guards: tuple[Guard, ...] = ()
    reference: bool = False
    """Plain torch: timed only where the point has no kernels for the device."""
    portable: bool = False
    """Plain torch that counts as a kernel on GPUs of `archs`, and as a reference elsewhere."""
    features: tuple[str, ...] | None = None
    """Those of the point's features that its time may depend on; None for all. A fit finds
    weights for whatever it is offered, so an arm is offered no other kernel's work."""
    surcharge: Callable[[Setting], Callable[[Batch], float]] | None = None
    """The microseconds that a batch behind a cliff takes more than the measurements before it
    tell; 0 before it."""
    first: Callable[[Any], Callable[[], torch.Tensor]] | None = None
    """As `build`, for the first layer of a pass: with what the pass computes once for all layers.
    The difference between the two is the cost of a pass. None where nothing is shared."""
    loss: str = ""
    """What a lossy arm does to the numbers that others do not. It runs only where the user asked
    for it; "" for an arm that computes what the model asks for."""
    tolerance: float | None = None
    """Errors above this make it wrong; None for the case's. A lossy arm has one of its own."""

    @property
    def choice(self) -> str:
        """Its name without the path."""
        return self.name.rpartition("/")[2]

    def runs_on(self, arch: str) -> bool:
        """Whether it runs on devices of `arch`."""
        return self.archs is None or arch in self.archs or self.portable

    def is_reference_on(self, arch: str) -> bool:
        """Whether it is timed on devices of `arch` only where they have no kernels."""
        return self.reference or (self.archs is not None and arch not in self.archs)

    def offered(self, setting: Setting) -> bool:
        """Whether the user could get it: not if its optional library is missing, nor if it is
        lossy and was not asked for."""
        if self.loss and self.choice not in setting.lossy:
            return False
        return self.requires not in setting.missing

    def surcharge_us(self, batch: Batch, setting: Setting) -> float:
        """What `batch` takes more because it lies behind a cliff."""
        if self.surcharge is None:
            return 0.0
        return self.surcharge(setting)(batch)

    def allowed(self, batch: Batch, setting: Setting) -> str | None:
        """Why this arm must not run on `batch`, or None when it may."""
        if setting.layout not in self.layouts:
            return f"{self.name} does not read {setting.layout} pools"
        if not self.runs_on(setting.device.arch):
            if setting.device.arch == "cpu" and self.requires is None and not self.reference:
                return f"{self.name} is declared for GPUs only"
            return f"{self.name} has no kernels for {setting.device.arch}"
        for guard in self.guards:
            reason = guard.check(batch, setting)
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseArm(Arm):
    """An arm that attends to selected tokens."""

    copied: Mapping[KVLayout, str] = field(hash=False)
    """By the layouts of `layouts` that its kernel does not read itself: what copies the batch's
    tokens into one that it does, module and function below `nsa_tune.backend.kernels`. Plans derive
    their conversions from it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question that a point's measurements answer: each choice costs its best allowed arm."""

    name: str
    """The name of the field in a `Plan`."""
    choices: Mapping[str, tuple[str, ...]]
    """Choice to the arms that realise it. On a tie the earlier choice is the stable default."""


@dataclass(frozen=True, slots=True)
class Point:
    """A decision point."""

    name: str
    modes: frozenset[Mode]
    arms: tuple[Arm, ...]
    questions: tuple[Question, ...]
    features: Callable[[Setting], FeatureFunctions]
    """What an arm's time is computed from."""
    grid: Callable[[Setting], list[Batch]]
    """The default sweep, coarse batches first, so that a part of it is already usable."""
    case: Callable[[Batch, Setting, torch.device], Case]
    """The input tensors of a batch on a device. Imports torch."""
    sample: Callable[[Setting, Any], Batch]
    """A random batch from `random.Random`, for held-out checks: ragged half of the time."""
    families: frozenset[str] = frozenset({"dsa"})
    """Families of models that the question arises in."""
    regimes_alike: int = 1
    """How many regimes in a row differ in size only: what fails on a batch of one of them fails on
    the bigger ones of all."""
    corrected: bool = False
    """Whether choices go by the models' times with what they miss of batches alike: better, and
    about 0.2 ms a plan."""
    group: str = ""
    """A name for several points of one folder, which may stand for all of them."""

    def arm(self, name: str) -> Arm:
        """The arm called `name`.

        Raises:
            UnknownName: when the point has no such arm.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UnknownName.of(f"arm of {self.name}", name, [arm.name for arm in self.arms])

    def arms_taken(self, choose: Callable[[Question], str | None]) -> set[str]:
        """The arms that remain when every question is answered as `choose` does."""
        left = {arm.name for arm in self.arms}
        for question in self.questions:
            taken = set(question.choices.get(choose(question) or "", ()))
            left -= {arm for arms in question.choices.values() for arm in arms} - taken
        return left

    def regime_group(self, regime: int) -> int:
        """A number that regimes share which differ in size only."""
        return regime // self.regimes_alike

    def candidates(self, setting: Setting) -> Iterator[Arm]:
        """The arms worth timing in this setting: all that the device has kernels for.

        Reference arms are among them only where there are no kernels at all: timed against a
        kernel, plain torch would speak for a library that is not there.
        """
        fits = [
            arm
            for arm in self.arms
            if setting.layout in arm.layouts
            and arm.runs_on(setting.device.arch)
            and arm.offered(setting)
        ]
        kernels = [arm for arm in fits if not arm.is_reference_on(setting.device.arch)]
        yield from kernels or fits
