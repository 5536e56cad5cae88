"""Measure all arms of one batch: build, check against the reference, then time interleaved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_tune._errors import MachineUnfit, NsaTuneError
from nsa_tune.autotune.bench.timing import Sampler, Timer, Timing, interleave
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Case, Point, Setting
from nsa_tune.backend.types.records import Measurement, Status

__all__ = ["ContextLost", "alive", "measure_batch"]

_log = logging.getLogger(__name__)
_REASON_LENGTH = 300


class ContextLost(MachineUnfit):
    """An arm broke the CUDA context: only a new process can go on."""

    def __init__(self, arm: str, batch: str, measured: Sequence[Measurement]) -> None:
        super().__init__(
            f"{arm} broke the CUDA context on {batch} and is recorded as failed; "
            "run the same command again to continue with the next batch"
        )
        self.measured = list(measured)


@dataclass(frozen=True, slots=True)
class _Ready:
    """An arm that gave the right answer and waits to be timed."""

    arm: Arm
    sampler: Sampler
    error: float


def measure_batch(
    point: Point,
    batch: Batch,
    arms: Sequence[Arm],
    setting: Setting,
    device: torch.device,
    timer: Timer,
) -> list[Measurement]:
    """One measurement for each of `arms`, failed ones with their reason.

    Raises:
        ContextLost: when the device cannot go on in this process; it carries what was measured.
        SlowedDown: when the device stays slowed down.
    """
    word = str(batch)
    try:
        case = point.case(batch, setting, device)
    except NsaTuneError:
        raise
    except Exception as failure:  # noqa: BLE001 - memory may be short even for the inputs
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
        timed = interleave([one.sampler for one in ready], timer) if ready else []
    except NsaTuneError:
        raise
    except Exception as failure:  # noqa: BLE001 - a fault shows when its graph is replayed
        return failed + _all_failed(point, word, [one.arm for one in ready], failure, device)
    passed = [
        _passed(point.name, word, one, timing) for one, timing in zip(ready, timed, strict=True)
    ]
    del ready, case
    timer.release()
    return passed + failed


def _prepare(point: Point, word: str, arm: Arm, case: Case, timer: Timer) -> _Ready | Measurement:
    try:
        run = arm.build(case)
        error = case.error_of(timer.first(run))
        if error > case.tolerance:
            reason = f"relative error {error:.3g} passes {case.tolerance:g}"
            return Measurement(point.name, word, arm.name, Status.WRONG, error=error, reason=reason)
        return _Ready(arm, timer.sampler(run), error)
    except Exception as failure:  # noqa: BLE001 - a kernel library may raise anything
        return _failed(point, word, arm, failure)


def _failed(point: Point, word: str, arm: Arm, failure: Exception) -> Measurement:
    reason = f"{type(failure).__name__}: {failure}"
    one_line = " ".join(reason.split())[:_REASON_LENGTH]
    return Measurement(point.name, word, arm.name, Status.FAILED, reason=one_line)


def _all_failed(
    point: Point, word: str, arms: Sequence[Arm], failure: Exception, device: torch.device
) -> list[Measurement]:
    """A failure that no single arm can be blamed for, so that the next run passes the batch."""
    rows = [_failed(point, word, arm, failure) for arm in arms]
    if not alive(device):
        raise ContextLost(" or ".join(arm.name for arm in arms), word, rows) from failure
    return rows


def _passed(point: str, word: str, one: _Ready, timing: Timing) -> Measurement:
    return Measurement(
        point,
        word,
        one.arm.name,
        Status.OK,
        latency_us=timing.median_us,
        low_us=timing.low_us,
        high_us=timing.high_us,
        samples=timing.samples,
        discarded=timing.discarded,
        error=one.error,
    )


def alive(device: torch.device) -> bool:
    """False when the CUDA context is lost: every later call would fail with the old error."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True
