"""Bench: what measures batches on one device, inside of a worker or of the run's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from nsa_tune.autotune.bench import devices, memory
from nsa_tune.autotune.bench.ceilings import measure_ceilings
from nsa_tune.autotune.bench.measure import ContextLost, alive, measure_batch
from nsa_tune.autotune.bench.registry import points_in
from nsa_tune.autotune.bench.timing import Run, Sampler, Timer, timer_for
from nsa_tune.autotune.worker.messages import Answer, Hello, Start, Work
from nsa_tune.autotune.worker.quarantine import for_inputs, held_elsewhere, out_of_memory
from nsa_tune.autotune.worker.recorder import NO_ARM, Recorder, Stage
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.point import Arm, Case, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status

__all__ = ["Bench", "default_model"]

_ELSEWHERE = 0.1
"""Of a device's memory. What other processes hold beyond it may be why there was too little."""


def default_model(device: torch.device) -> str:
    """What is measured when nobody says: V3.2 on a GPU, the tiny profile on a CPU."""
    return "deepseek-v3.2" if device.type == "cuda" else "tiny"


class Bench:
    """A device with its timer and setting.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when the device, or a library that its arms need, is missing.
    """

    def __init__(self, start: Start, recorder: Recorder) -> None:
        self._recorder = recorder
        self._device = devices.pick_device(start.device)
        if self._device.type == "cuda":
            # Kernels of libraries are launched on the current device, whatever their inputs' is.
            torch.cuda.set_device(self._device)
        self._setting = _setting(start, self._device)
        profile = self._setting.profile
        self._points = {p.name: p for p in points_in(start.registry, start.points, profile)}
        arms = [arm for p in self._points.values() for arm in p.candidates(self._setting)]
        devices.check_libraries(arms)
        self._timer = _Watched(timer_for(self._device), recorder)
        self.hello = Hello(
            self._setting,
            devices.key_of(self._setting, self._timer.timer),
            devices.unit_of(self._device),
            devices.others_on(self._device),
        )
        recorder.note(Stage.IDLE)

    def measure(self, work: Work) -> Answer:
        """Measure one batch; an arm that is not to blame for a fault has no row.

        Raises:
            MachineUnfit: when the device stays slowed down.
        """
        answer = self._measure(work)
        if _short_of_memory(answer):
            # A device whose memory is in pieces has room after all.
            gc.collect()
            memory.give_back(self._device)
            answer = self._measure(work)
        if _short_of_memory(answer):
            held, total = memory.held_by_others(self._device)
            if held > _ELSEWHERE * total:
                answer = replace(answer, rows=tuple(
                    held_elsewhere(row, held) if out_of_memory(row) else row for row in answer.rows
                ))  # fmt: skip
        self._recorder.note(Stage.IDLE)
        return answer

    def ceilings(self) -> Answer:
        """Measure what the device reaches in copies and products."""
        rows = measure_ceilings(
            self._setting.device.arch, self._device, self._timer.timer,
            lambda index: self._recorder.note(Stage.FIRST, index),
        )  # fmt: skip
        lost = not alive(self._device)
        if not lost:
            # Their tensors are larger than any batch's.
            gc.collect()
            memory.give_back(self._device)
        self._recorder.note(Stage.IDLE)
        return Answer(tuple(rows), lost)

    def _measure(self, work: Work) -> Answer:
        point = self._points[work.point]
        arms = [self._timer.watched(i, point.arm(name)) for i, name in enumerate(work.arms)]
        self._recorder.note(Stage.INPUTS)
        try:
            rows = measure_batch(
                point, work.batch, arms, self._setting, self._device, cast("Timer", self._timer)
            )
        except ContextLost as lost:
            return Answer(tuple(self._blamed(lost.measured, work)), lost=True)
        return Answer(tuple(self._blamed(rows, work)))

    def _blamed(self, rows: list[Measurement], work: Work) -> list[Measurement]:
        """`rows` of the arm that was touched last, if they failed together.

        Arms are timed together, so a fault then fails all of them, and only the recorder knows
        which one was running.
        """
        moment = self._recorder.read()
        if moment.stage is Stage.INPUTS:
            return [for_inputs(row) if row.status is Status.FAILED else row for row in rows]
        if moment.stage is not Stage.SAMPLE or any(row.status is Status.OK for row in rows):
            return rows
        guilty = next((r for r in rows if r.arm == work.arms[moment.arm]), None)
        if guilty is None:
            return rows
        return [r for r in rows if r is guilty or r.reason != guilty.reason]


def _short_of_memory(answer: Answer) -> bool:
    return not answer.lost and any(out_of_memory(row) for row in answer.rows)


def _setting(start: Start, device: torch.device) -> Setting:
    profile = profile_of(start.model or default_model(device))
    heads = profile.heads if start.heads is None else profile.check_heads(start.heads)
    return Setting(
        profile=profile,
        heads=heads,
        layout=profile.layout(start.kv_dtype),
        device=devices.describe(device),
        libraries=dict(detect.library_versions()),
    )


class _Watched:
    """A timer whose arms leave a note at every step."""

    def __init__(self, timer: Timer, recorder: Recorder) -> None:
        self.timer = timer
        self._recorder = recorder
        self._arm = NO_ARM

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timer, name)

    def watched(self, index: int, arm: Arm) -> Arm:
        """`arm`, number `index` of a batch, which says so when it is built."""

        def build(case: Case) -> Callable[[], torch.Tensor]:
            self._arm = index
            self._recorder.note(Stage.FIRST, index)
            return arm.build(case)

        return replace(arm, build=build)

    def sampler(self, run: Run) -> Sampler:
        """As the timer's; the arm that was built last is the one."""
        index, inner = self._arm, self.timer.sampler(run)

        def sample() -> float:
            self._recorder.note(Stage.SAMPLE, index)
            return inner()

        return sample
