"""The launcher of this host: an executor for each of its devices that a run names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from nsa_tune.autotune.worker.executor import Executor
from nsa_tune.autotune.worker.isolated import Deadlines, IsolatedExecutor
from nsa_tune.autotune.worker.messages import Setup


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """A `Launcher` for devices of this host."""

    waits_for_all: ClassVar[bool] = True
    """The devices of one host are ready at about the same time."""
    devices: tuple[str, ...]
    """Names as `Setup.device` takes them."""
    isolate: bool = True
    """Measure in worker processes. Otherwise an arm that crashes ends the run."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """When a worker counts as hung."""

    def launch(self, setup: Setup) -> Sequence[Executor]:
        """As `Launcher.launch`."""
        return [self._executor(replace(setup, device=name)) for name in self.devices]

    def _executor(self, setup: Setup) -> Executor:
        if self.isolate:
            return IsolatedExecutor(setup, self.deadlines)
        # Imported only here, because it loads torch: with workers, this process does not need it.
        from nsa_tune.autotune.worker.in_process import InProcessExecutor

        return InProcessExecutor(setup)

    def close(self) -> None:
        """As `Launcher.close`; nothing is held."""
