"""`nsa-tune probe`: find limits of this machine's kernels by experiment, and store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nsa_tune._errors import MachineUnfit, UnknownName, UsageError
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.timing import protocol_of
from nsa_tune.autotune.probe.bisection import Found, find_limit
from nsa_tune.autotune.probe.child import Target
from nsa_tune.autotune.probe.tries import Outcome, Try, attempt
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.libraries.deep_gemm.limits import metadata_rows
from nsa_tune.backend.libraries.flash_mla.limits import (
    padded_heads,
    schedule_rows,
    split_parts,
)
from nsa_tune.backend.types.point import Setting
from nsa_tune.db.store import Store

_TRIALS = "nsa_tune.autotune.probe.trials"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that can be found by experiment."""

    name: str
    """One of `backend.libraries.limits.PROBED`."""
    trial: str
    """"module:function" of the trial; see `probe.child.Trial`."""
    start: int
    """The size at which doubling begins."""
    most: Callable[[Setting], int]
    """The largest size to try."""
    expected: Callable[[Setting], int | None]
    """The limit by a formula, which is tried first; None without a formula."""
    requires: str | None = None
    """The kernel library that it is a limit of."""
    control: str | None = None
    """A trial of everything that a try needs but the kernel. It runs when no size succeeded."""
    time_trial: str | None = None
    """For a limit behind which the kernel may still run, but slower (outcome WRONG): a trial that
    returns the microseconds of a size. It runs on both sides of the limit, and the nanoseconds that
    a row takes more behind it are stored as `time_name`."""
    time_name: str = ""
    also: str = ""
    """Another limit, which is set to the same size when the kernel does not run behind it."""


def _flashmla_most(setting: Setting) -> int:
    """The most rows whose offsets fit into 32 bits in FlashMLA's decode kernel."""
    heads = padded_heads(setting.heads) or 128
    return (2**31 - 1) // (heads * 512) - split_parts(setting)


LIMITS: dict[str, Limit] = {
    limit.name: limit
    for limit in (
        Limit(
            "deep_gemm_metadata_rows", f"{_TRIALS}:metadata_rows", 1024,
            lambda setting: 2**18, metadata_rows, "deep_gemm",
            f"{_TRIALS}:deep_gemm_loads",
        ),
        Limit(
            "deep_gemm_next_n", f"{_TRIALS}:next_n", 1, lambda setting: 8,
            lambda setting: 2 if setting.device.arch == "sm90" else None, "deep_gemm",
            f"{_TRIALS}:deep_gemm_loads",
        ),
        Limit(
            "flashmla_schedule_rows", f"{_TRIALS}:schedule_rows", 1024, _flashmla_most,
            schedule_rows, "flash_mla", f"{_TRIALS}:flash_mla_loads",
            f"{_TRIALS}:schedule_time", "flashmla_schedule_ns_per_row", "flashmla_decode_rows",
        ),
        Limit(
            "flashmla_decode_rows", f"{_TRIALS}:decode_rows", 1024,
            lambda setting: 3 * _flashmla_most(setting) // 2, _flashmla_most, "flash_mla",
            f"{_TRIALS}:flash_mla_loads",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The options of `nsa-tune probe`."""

    database: Path
    device: str = "auto"
    model: str = "deepseek-v3.2"
    heads: int | None = None
    """Local heads; None takes all of the model's."""
    kv_dtype: str = "fp8"
    limits: tuple[str, ...] = ()
    """Names of limits; none means all that apply to this machine's kernels."""
    blind: bool = False
    """Do not try first what the formulas say."""
    deadline_s: float = 120.0
    """Seconds after which a try counts as hung."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probe found of one limit."""

    name: str
    formula: int | None
    """The limit by its formula."""
    found: Found
    ns_per_row: int | None = None
    """Nanoseconds that a row takes more behind the limit, where the kernel runs, but slower."""
    untried: str = ""
    """Why the kernel could not be tried, so that nothing is stored; "" where it could."""


Told: TypeAlias = Callable[[str, Try], None]
"""Is called with the name of a limit when a try for it has ended."""


def probe(request: ProbeRequest, told: Told | None = None) -> list[Probed]:
    """Find the limits that `request` names, and store each as soon as it is found.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when this machine has no kernel with such a limit.
        StoreError: when the database cannot be used.
    """
    device = devices.pick_device(request.device)
    setting = devices.setting_of(device, request.model, request.heads, request.kv_dtype)
    if not setting.profile.has_indexer:
        raise UsageError(
            f"the limits that a probe finds are of sparse kernels, and {request.model} has none: "
            "name a model with an indexer"
        )
    limits = _wanted(request, setting)
    key = devices.key_of(setting, protocol_of(device))
    target = Target(request.model, setting.heads, request.kv_dtype, str(device))
    results = []
    with Store.open(request.database) as store:
        number = store.begin_run(key, setting.device, {"probe": [limit.name for limit in limits]})
        outcome = "interrupted"
        try:
            for limit in limits:
                probed = _probed(limit, setting, target, request, told)
                store.add_limits(number, _rows(limit, probed))
                results.append(probed)
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
    # The libraries have kernels for GPUs only.
    return setting.device.arch != "cpu" and providers.answering(limit.requires) is not None


def _probed(
    limit: Limit, setting: Setting, target: Target, request: ProbeRequest,
    told: Told | None,
) -> Probed:  # fmt: skip
    def run(size: int) -> Try:
        result = attempt(limit.trial, size, target, request.deadline_s)
        if told is not None:
            told(limit.name, result)
        return result

    formula, most = limit.expected(setting), limit.most(setting)
    expected = None if request.blind else formula
    search = find_limit(run, min(limit.start, most), most, expected)
    past = search.past
    if (
        past is not None
        and search.limit == 0
        and (why := _untried(limit, past, run, target, request))
    ):
        return Probed(limit.name, formula, search, untried=why)
    slower = None
    if limit.time_trial is not None and past is not None and past.outcome is Outcome.WRONG:
        slower = _ns_per_row_behind(limit.time_trial, search, target, request.deadline_s)
    return Probed(limit.name, formula, search, slower)


def _untried(
    limit: Limit, first: Try, run: Callable[[int], Try], target: Target, request: ProbeRequest
) -> str:
    """Why the kernel could not be tried, after `first` failed at the smallest size; "" if it could.

    A stored limit of 0 bars the kernel on this machine. So all else that a try needs must work,
    and the kernel must refuse once more.
    """
    if not _by_the_kernel(first):
        return f"{first.words}, at size {first.size} already"
    if limit.control is not None:
        control = attempt(limit.control, 1, target, request.deadline_s)
        if control.outcome is not Outcome.OK:
            return f"the library or the device does not work: {control.words}"
    again = run(first.size)
    if again.outcome is Outcome.OK:
        return f"size {first.size} failed, and succeeded when it was tried again: {first.words}"
    return "" if _by_the_kernel(again) else f"{again.words}, at size {first.size} already"


def _by_the_kernel(result: Try) -> bool:
    """Whether the kernel itself may have failed: a busy device makes a try hang, and no memory
    on the host kills it."""
    if result.outcome in (Outcome.MEMORY, Outcome.HUNG):
        return False
    return not (result.outcome is Outcome.KILLED and result.words.startswith("SIGKILL"))


def _ns_per_row_behind(trial: str, search: Found, target: Target, deadline_s: float) -> int | None:
    """Nanoseconds per row that the smallest size behind the limit takes more; None if it fails."""
    assert search.past is not None
    sizes = (search.limit, search.past.size)
    before, after = (attempt(trial, size, target, deadline_s) for size in sizes)
    if before.numbers is None or after.numbers is None:
        return None
    return max(round((after.numbers["us"] - before.numbers["us"]) * 1e3 / after.size), 0)


def _rows(limit: Limit, probed: Probed) -> dict[str, tuple[int, str]]:
    """The limits to store: none when memory ran out or the kernel could not be tried."""
    limit_found, past = probed.found.limit, probed.found.past
    if past is None or past.outcome is Outcome.MEMORY or probed.untried:
        return {}
    words = f"{past.size}: {past.outcome}, {past.words}"
    rows = {probed.name: (limit_found, words)}
    if probed.ns_per_row is not None:
        rows[limit.time_name] = (probed.ns_per_row, words)
    elif limit.also and past.outcome is not Outcome.WRONG:
        rows[limit.also] = (limit_found, words)
    return rows
