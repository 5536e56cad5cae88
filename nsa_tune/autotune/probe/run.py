"""Probe: find the limits of this machine's kernels by experiment, and store them under its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nsa_tune._errors import MachineUnfit, UnknownName
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.timing import protocol_of
from nsa_tune.autotune.probe.child import Target
from nsa_tune.autotune.probe.search import Found, Outcome, Try, attempt, search
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import guards
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.db.store import Store

__all__ = ["LIMITS", "Limit", "ProbeProgress", "ProbeRequest", "Probed", "probe"]

_TRIALS = "nsa_tune.autotune.probe.trials"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that can be found by experiment."""

    name: str
    """As in `backend.guards.PROBED`."""
    trial: str
    """ "module:function" that tries one size in its own process."""
    start: int
    """Where doubling begins."""
    most: Callable[[Setting], int]
    """The largest size to try."""
    expected: Callable[[Setting], int | None]
    """What a formula says; it is tried first."""
    requires: str | None = None
    price: str | None = None
    """A trial that gives the microseconds of a size. Where the limit is a cliff it is run on both
    sides, and what the far side costs more for each row is stored as `price_name`."""
    price_name: str = ""
    also: str = ""
    """Where it is no cliff, another limit that ends at the same size: nothing may run behind."""


def _flashmla_most(setting: Setting) -> int:
    """Rows up to which FlashMLA's decode kernel has room for its offsets."""
    heads = guards.padded_heads(setting.heads) or 128
    return (2**31 - 1) // (heads * 512) - guards.split_parts(setting)


LIMITS: dict[str, Limit] = {
    limit.name: limit
    for limit in (
        Limit(
            "deep_gemm_metadata_rows", f"{_TRIALS}:metadata_rows", 1024,
            lambda setting: 2**18, guards.metadata_rows, "deep_gemm",
        ),
        Limit(
            "deep_gemm_next_n", f"{_TRIALS}:next_n", 1, lambda setting: 8,
            lambda setting: 2 if setting.device.arch == "sm90" else None, "deep_gemm",
        ),
        Limit(
            "flashmla_schedule_rows", f"{_TRIALS}:schedule_rows", 1024, _flashmla_most,
            guards.schedule_rows, "flash_mla", f"{_TRIALS}:schedule_time",
            "flashmla_schedule_ns_per_row", "flashmla_decode_rows",
        ),
        Limit(
            "flashmla_decode_rows", f"{_TRIALS}:decode_rows", 1024,
            lambda setting: 3 * _flashmla_most(setting) // 2, _flashmla_most, "flash_mla",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What `nsa-tune probe` was asked for."""

    database: Path
    device: str = "auto"
    model: str = "deepseek-v3.2"
    heads: int | None = None
    """Local heads; None takes all of the model's."""
    kv_dtype: str = "fp8"
    limits: tuple[str, ...] = ()
    """Names of limits; none means all that this machine's kernels have."""
    blind: bool = False
    """Search without what the formulas say."""
    deadline_s: float = 120.0
    """Seconds after which a try counts as hung."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found of one limit."""

    name: str
    formula: int | None
    found: Found
    ns_per_row: int | None = None
    """What a row costs more behind a cliff."""


class ProbeProgress(Protocol):
    """Who is told how the probe goes."""

    def tried(self, name: str, one: Try) -> None:
        """A try of the limit `name` has ended."""
        ...


def probe(request: ProbeRequest, progress: ProbeProgress | None = None) -> list[Probed]:
    """Find the limits that `request` names, and store each as soon as it is found.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when this machine has no kernel with such a limit.
        StoreError: when the database cannot be used.
    """
    device = devices.pick_device(request.device)
    profile = profile_of(request.model)
    heads = profile.heads if request.heads is None else profile.check_heads(request.heads)
    setting = Setting(
        profile, heads, profile.layout(request.kv_dtype), devices.describe(device),
        dict(detect.library_versions()),
    )  # fmt: skip
    limits = _wanted(request, setting)
    key = devices.key_with(setting, protocol_of(device))
    target = Target(request.model, heads, request.kv_dtype, str(device))
    results = []
    with Store.open(request.database) as store:
        number = store.begin_run(key, setting.device, {"probe": [limit.name for limit in limits]})
        outcome = "interrupted"
        try:
            for limit in limits:
                one = _probed(limit, setting, target, request, progress)
                store.add_limits(number, _rows(limit, one))
                results.append(one)
            outcome = "done"
        finally:
            store.end_run(number, outcome)
    return results


def _wanted(request: ProbeRequest, setting: Setting) -> list[Limit]:
    unknown = [name for name in request.limits if name not in LIMITS]
    if unknown:
        raise UnknownName.of("limit", unknown[0], list(LIMITS))
    fits = [
        limit
        for limit in LIMITS.values()
        if (not request.limits or limit.name in request.limits) and _fits(limit, setting)
    ]
    if not fits:
        raise MachineUnfit(
            f"nothing to probe: {setting.device.name} with these libraries has no kernel with one "
            f"of these limits: {', '.join(request.limits or LIMITS)}; see nsa-tune doctor"
        )
    return fits


def _fits(limit: Limit, setting: Setting) -> bool:
    if limit.requires is None:
        return True
    # Kernels of a library are for a GPU.
    return setting.device.arch != "cpu" and providers.answering(limit.requires) is not None


def _probed(
    limit: Limit, setting: Setting, target: Target, request: ProbeRequest,
    progress: ProbeProgress | None,
) -> Probed:  # fmt: skip
    def run(size: int) -> Try:
        one = attempt(limit.trial, size, target, request.deadline_s)
        if progress is not None:
            progress.tried(limit.name, one)
        return one

    formula, most = limit.expected(setting), limit.most(setting)
    expected = None if request.blind else formula
    found = search(run, min(limit.start, most), most, expected)
    price = None
    if limit.price is not None and found.past is not None and found.past.outcome is Outcome.WRONG:
        price = _price(limit.price, found, target, request.deadline_s)
    return Probed(limit.name, formula, found, price)


def _price(trial: str, found: Found, target: Target, deadline_s: float) -> int | None:
    """Nanoseconds a row that the smallest size behind the limit takes more."""
    assert found.past is not None
    sizes = (found.limit, found.past.size)
    before, after = (attempt(trial, size, target, deadline_s) for size in sizes)
    if before.numbers is None or after.numbers is None:
        return None
    return max(round((after.numbers["us"] - before.numbers["us"]) * 1e3 / after.size), 0)


def _rows(limit: Limit, one: Probed) -> dict[str, tuple[int, str]]:
    """What is stored. A search that ended for want of memory says nothing about the kernel."""
    found, past = one.found, one.found.past
    if past is None or past.outcome is Outcome.MEMORY:
        return {}
    words = f"{past.size}: {past.outcome}, {past.words}"
    rows = {one.name: (found.limit, words)}
    if one.ns_per_row is not None:
        rows[limit.price_name] = (one.ns_per_row, words)
    elif limit.also and past.outcome is not Outcome.WRONG:
        rows[limit.also] = (found.limit, words)
    return rows
