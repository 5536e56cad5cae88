"""A device of the device pool, with the sweep that it measures for."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.autotune.runner.sweep import Sweep, Task
from nsa_tune.autotune.worker.executor import Executor


@dataclass(slots=True)
class PooledDevice:
    """One device of the pool, with the sweep that it measures for."""

    executor: Executor
    sweep: Sweep
    unit: str
    task: Task | None = None
    at_ceilings: bool = False
    """Whether it measures the roofline ceilings."""

    @property
    def busy(self) -> bool:
        """Whether it measures something."""
        return self.at_ceilings or self.task is not None

    def give_back(self) -> None:
        """The device is gone: what it was measuring is to be measured by another one."""
        if self.task is not None:
            self.sweep.give_back(self.unit, self.task)
        if self.at_ceilings:
            self.sweep.give_back_ceilings()
        self.task, self.at_ceilings = None, False
