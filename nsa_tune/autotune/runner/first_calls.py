"""First calls of arms that take long: while a kernel compiles, nothing else shows that a run lives.

The first ones of a run may take minutes, and no batch is finished meanwhile.
"""

from __future__ import annotations

from time import monotonic

from nsa_tune.autotune.runner.pooled_device import PooledDevice
from nsa_tune.autotune.runner.progress import Incident
from nsa_tune.autotune.worker.executor import FirstCall

SLOW_S = 10.0
"""After this a first call is reported, and then as often as `AGAIN_S` says."""
AGAIN_S = 30.0


class FirstCalls:
    """Which first calls were reported, and when."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[FirstCall, float]] = {}
        """By unit: the call, and when it was reported last."""

    def look(self, device: PooledDevice, *, alone: bool) -> Incident | None:
        """What to report of `device` now; None for most calls.

        Args:
            alone: no other device measures, so that the report need not name this one.
        """
        call = device.executor.first_call()
        if call is None or device.task is None:
            self._told.pop(device.unit, None)
            return None
        told = self._told.get(device.unit)
        again = told is not None and told[0] == call
        due = told[1] + AGAIN_S if told is not None and again else call.since + SLOW_S
        now = monotonic()
        if now < due:
            return None
        self._told[device.unit] = (call, now)
        job, where = device.task.job, "" if alone else f" on {device.unit}"
        text = (
            f"{call.arm} of {job.point.name}{where}: its first call on {job.batch}, which may "
            f"compile its kernel, has taken {now - call.since:.0f} s so far; after "
            f"{call.limit_s:.0f} s it counts as hung"
        )
        return Incident("first_call", text)
