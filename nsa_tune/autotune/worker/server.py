"""The measurement server: measures on one device what a run asks for.

It runs in a worker process, or in the run's own process with `run --no-isolate`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.ceilings import measure_ceilings
from nsa_tune.autotune.bench.failures import out_of_memory
from nsa_tune.autotune.bench.measure import ContextLost, alive, measure_batch
from nsa_tune.autotune.bench.registry import points_in
from nsa_tune.autotune.bench.timing import Run, Sampler, Timer, timer_for
from nsa_tune.autotune.worker.flight_recorder import NO_ARM, FlightRecorder, Stage
from nsa_tune.autotune.worker.messages import MeasureBatch, Ready, Results, Setup
from nsa_tune.backend.types.point import Arm, Case
from nsa_tune.backend.types.records import Measurement, Status


class MeasurementServer:
    """A device with its timer, ready to measure.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when the device, or a library that its arms need, is missing.
    """

    def __init__(self, setup: Setup, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._device = devices.pick_device(setup.device)
        if self._device.type == "cuda":
            # Some libraries launch on the current device, wherever their inputs are.
            torch.cuda.set_device(self._device)
        model = setup.model or ("deepseek-v3.2" if self._device.type == "cuda" else "tiny")
        self._setting = devices.setting_of(
            self._device, model, setup.heads, setup.kv_dtype, setup.lossy, setup.overlap
        )
        points = points_in(setup.registry, setup.points, self._setting.profile)
        self._points = {point.name: point for point in points}
        devices.check_libraries([arm for p in points for arm in p.candidates(self._setting)])
        self._timer = _RecordedTimer(timer_for(self._device), recorder)
        self.ready = Ready(
            self._setting,
            devices.key_of(self._setting, self._timer.timer.protocol),
            devices.unit_of(self._device),
            devices.others_on(self._device),
        )
        recorder.note(Stage.IDLE)

    def measure(self, request: MeasureBatch) -> Results:
        """Measure one batch. When a fault fails all arms, only the one that caused it has a row.

        Raises:
            MachineUnfit: when the device stays slowed down.
        """
        results = self._measure(request)
        if not results.context_lost and any(map(out_of_memory, results.rows)):
            # The memory may be there, but in pieces: free what torch caches and try again.
            self._release_cached()
            results = self._measure(request)
        self._recorder.note(Stage.IDLE)
        return results

    def measure_ceilings(self) -> Results:
        """Measure the roofline ceilings."""
        self._recorder.note(Stage.FIRST)
        rows = measure_ceilings(self._setting.device.arch, self._device, self._timer.timer)
        lost = not alive(self._device)
        if not lost:
            # Their tensors are larger than any batch's: do not keep them in torch's cache.
            self._release_cached()
        self._recorder.note(Stage.IDLE)
        return Results(tuple(rows), lost)

    def _release_cached(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, request: MeasureBatch) -> Results:
        point = self._points[request.point]
        arms = [self._timer.recorded(i, point.arm(name)) for i, name in enumerate(request.arms)]
        self._recorder.note(Stage.INPUTS)
        try:
            rows = measure_batch(
                point, request.batch, arms, self._setting, self._device,
                cast("Timer", self._timer),
            )  # fmt: skip
        except ContextLost as lost:
            return Results(tuple(self._blame(lost.measured, request)), context_lost=True)
        return Results(tuple(self._blame(rows, request)))

    def _blame(self, rows: list[Measurement], request: MeasureBatch) -> list[Measurement]:
        """`rows` without the arms that failed only because another one did.

        Arms are timed in turns, so a fault during timing fails all of them. The recorder knows
        which arm was running: it keeps its row, and the others are measured again.
        """
        activity = self._recorder.read()
        if activity.stage is not Stage.SAMPLE or any(row.status is Status.OK for row in rows):
            return rows
        guilty = next((r for r in rows if r.arm == request.arms[activity.arm]), None)
        if guilty is None:
            return rows
        return [r for r in rows if r is guilty or r.reason != guilty.reason]


class _RecordedTimer:
    """A timer that notes in the flight recorder which arm is being built or sampled."""

    def __init__(self, timer: Timer, recorder: FlightRecorder) -> None:
        self.timer = timer
        self._recorder = recorder
        self._arm = NO_ARM

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timer, name)

    def recorded(self, index: int, arm: Arm) -> Arm:
        """`arm`, which is number `index` of the batch, with a note whenever it is built."""

        def build(case: Case) -> Callable[[], torch.Tensor]:
            self._arm = index
            self._recorder.note(Stage.FIRST, index)
            return arm.build(case)

        return replace(arm, build=build)

    def sampler(self, run: Run) -> Sampler:
        """As `Timer.sampler`, for the arm that was built last; each sample leaves a note."""
        index, inner = self._arm, self.timer.sampler(run)

        def sample() -> float:
            self._recorder.note(Stage.SAMPLE, index)
            return inner()

        return sample
