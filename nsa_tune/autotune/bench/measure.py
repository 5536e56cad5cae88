"""Measure the arms of one batch: build each, check its output, then time all of them in turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from statistics import median

import torch

from nsa_tune._errors import MachineUnfit, NsaTuneError
from nsa_tune.autotune.bench.failures import reason_of
from nsa_tune.autotune.bench.timing import Sampler, Timer, interleave
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Case, Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

_log = logging.getLogger(__name__)

_PAIRS = 11
"""Pairs of a first and a later layer from which the cost of a pass is taken."""


class ContextLost(MachineUnfit):
    """An arm broke the CUDA context: only a new process can go on.

    `measured` has the rows so far.
    """

    def __init__(self, arm: str, batch: str, measured: Sequence[Measurement]) -> None:
        super().__init__(
            f"{arm} broke the CUDA context on {batch} and is recorded as failed; "
            "run the same command again to continue with the next batch"
        )
        self.measured = list(measured)


@dataclass(frozen=True, slots=True)
class _Ready:
    """An arm whose output is right, ready to be timed."""

    arm: Arm
    sampler: Sampler
    error: float
    first: Sampler | None
    """The same in the first layer of a pass."""


def measure_batch(
    point: Point,
    batch: Batch,
    arms: Sequence[Arm],
    setting: Setting,
    device: torch.device,
    timer: Timer,
) -> list[Measurement]:
    """Measure `arms` on `batch`.

    Returns:
        A row for each arm: its time in microseconds, or the reason of its failure. An arm whose
        output differs from the reference by more than its tolerance (the case's, unless it has its
        own) is WRONG and not timed.

    Raises:
        ContextLost: when an arm broke the CUDA context; it carries the rows that there are.
        SlowedDown: when the device stays slowed down.
    """
    word = str(batch)
    try:
        case = point.case(batch, setting, device)
    except NsaTuneError:
        raise
    except Exception as failure:  # noqa: BLE001 - even the input tensors may not fit into memory
        return _all_failed(point, word, arms, failure, device)
    ready: list[_Ready] = []
    failed: list[Measurement] = []
    for arm in arms:
        outcome = _prepare(point, word, arm, case, timer)
        if isinstance(outcome, _Ready):
            ready.append(outcome)
            continue
        failed.append(outcome)
        _log.warning("%s failed on %s: %s", arm.name, word, outcome.reason)
        if not alive(device):
            raise ContextLost(arm.name, word, failed)
    try:
        timed = interleave([prepared.sampler for prepared in ready], timer) if ready else []
        passes = [_pass_us(prepared) for prepared in ready]
    except NsaTuneError:
        raise
    except Exception as failure:  # noqa: BLE001 - a kernel may fault at its graph's replay only
        return failed + _all_failed(
            point, word, [prepared.arm for prepared in ready], failure, device
        )
    passed = [
        timing.row(point.name, word, prepared.arm.name, prepared.error, pass_us)
        for prepared, timing, pass_us in zip(ready, timed, passes, strict=True)
    ]
    del ready, case
    timer.release()
    return passed + failed


def _prepare(point: Point, word: str, arm: Arm, case: Case, timer: Timer) -> _Ready | Measurement:
    try:
        run = arm.build(case)
        error = case.error_of(timer.first(run))
        # No number is above a tolerance: a case that returns one must not pass for right.
        error = inf if isnan(error) else error
        most = case.tolerance if arm.tolerance is None else arm.tolerance
        if error > most:
            reason = f"relative error {error:.3g} passes {most:g}"
            return Measurement(point.name, word, arm.name, Status.WRONG, error=error, reason=reason)
        first = None if arm.first is None else arm.first(case)
        if first is not None:
            timer.first(first)
        return _Ready(
            arm, timer.sampler(run), error, None if first is None else timer.sampler(first)
        )
    except Exception as failure:  # noqa: BLE001 - a kernel library may raise anything
        return _failed(point, word, arm, failure)


def _failed(point: Point, word: str, arm: Arm, failure: Exception) -> Measurement:
    return Measurement(point.name, word, arm.name, Status.FAILED, reason=reason_of(failure))


def _all_failed(
    point: Point, word: str, arms: Sequence[Arm], failure: Exception, device: torch.device
) -> list[Measurement]:
    """Rows for a failure that may be any arm's: all get one, so the next run skips the batch."""
    rows = [_failed(point, word, arm, failure) for arm in arms]
    if not alive(device):
        raise ContextLost(" or ".join(arm.name for arm in arms), word, rows) from failure
    return rows


def _pass_us(prepared: _Ready) -> float | None:
    """What the first layer of a pass takes more than the others: the median over pairs."""
    if prepared.first is None:
        return None
    differences = [prepared.first() - prepared.sampler() for _ in range(_PAIRS)]
    return max(median(differences), 0.0)


def alive(device: torch.device) -> bool:
    """False when the CUDA context is broken: then every later CUDA call repeats the old error."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True
