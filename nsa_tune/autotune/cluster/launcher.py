"""The launcher of a Ray cluster: a worker for each of its GPUs, placed and restarted by Ray."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from io import TextIOBase
from socket import create_connection
from threading import current_thread, main_thread
from typing import Any, ClassVar

import ray

from nsa_tune import __version__
from nsa_tune._errors import MachineUnfit, UsageError
from nsa_tune.autotune.cluster.executor import RayExecutor
from nsa_tune.autotune.cluster.placement import WorkerGroup, check_device, groups_of
from nsa_tune.autotune.cluster.worker import RayWorker
from nsa_tune.autotune.worker.executor import Executor
from nsa_tune.autotune.worker.isolated import Deadlines
from nsa_tune.autotune.worker.messages import Setup

NICENESS = "RAY_worker_niceness"
"""Environment variable of Ray: how far its workers step back behind other processes."""

_KNOCK_S = 10.0
"""Time for a cluster to take a connection."""
_OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray of our own. Only messages of some kilobytes go through it."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RayLauncher:
    """A `Launcher` for the nodes of a Ray cluster."""

    waits_for_all: ClassVar[bool] = False
    """A busy cluster has room for some workers now, and for others later."""
    address: str | None = None
    """"HOST:PORT" of a cluster, "auto" for the one that runs on this host, or "local" for a new
    one on this host alone. None takes `RAY_ADDRESS`, else "auto" if there is one, else "local"."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "all"."""
    sample: int | None = None
    """Workers of each GPU model at most; None takes all."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """When a measuring process counts as hung."""
    patience_s: float = 600.0
    """Time for Ray to find room for a worker."""
    _opened: ExitStack = field(default_factory=ExitStack, init=False, repr=False, compare=False)

    def launch(self, setup: Setup) -> Sequence[Executor]:
        """As `Launcher.launch`.

        Raises:
            UsageError: for a device that names one GPU, or an address that Ray does not take.
            MachineUnfit: when there is no cluster at the address, or it has no such device.
        """
        check_device(self.device)
        self._opened.enter_context(redirect_stdout(_IntoLog()))
        self._opened.callback(ray.shutdown)
        _connect(self.address)
        nodes = _nodes()
        names = {node["NodeID"]: name for name, node in nodes.items()}
        return [
            self._executor(group, number, setup, names)
            for group in groups_of(nodes, self.device, self.sample)
            for number in range(group.workers)
        ]

    def _executor(
        self, group: WorkerGroup, number: int, setup: Setup, names: Mapping[str, str]
    ) -> RayExecutor:
        # A worker that died is made anew; its job is not repeated, others have it by then.
        actor = ray.remote(RayWorker).options(max_restarts=-1, max_task_retries=0, **group.options)
        worker = actor.remote(replace(setup, device=group.device), self.deadlines, __version__)
        name = f"worker {number + 1} of {group.name}"
        return RayExecutor(name, worker, names, self.patience_s)

    def close(self) -> None:
        """As `Launcher.close`: leaves the cluster, and ends it if this run started it."""
        self._opened.close()


class _IntoLog(TextIOBase):
    """Takes what Ray prints on stdout, among a run's data, whatever it is told about logs."""

    def write(self, text: str) -> int:
        if text.strip():
            _log.info("Ray: %s", text.rstrip())
        return len(text)


def _connect(address: str | None) -> None:
    """Connect to the cluster at `address`, as `RayLauncher.address` has it.

    Raises:
        UsageError: for an address that Ray does not take.
        MachineUnfit: when no cluster answers.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None and "://" in address:
        raise UsageError(
            f"--address {address} is for Ray's client; start nsa-tune on a node of the cluster, "
            "with --address auto or HOST:PORT"
        )
    if address is None:
        try:
            _init("auto")
        except ConnectionError:
            address = "local"
        else:
            return
    try:
        _check_listening(address)
        _init(address)
    except (ConnectionError, OSError) as error:
        raise MachineUnfit(
            f"there is no Ray cluster at {address}; start one with `ray start --head`, "
            "or use --address local"
        ) from error
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise MachineUnfit(f"Ray cannot use {address}: {first_line}") from error


def _check_listening(address: str) -> None:
    """Knock at HOST:PORT: where nothing listens, Ray itself tries again for minutes.

    Raises:
        OSError: when nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()


def _init(address: str) -> None:
    options: dict[str, Any] = {}
    if address == "local":
        # Nothing of a run that started a Ray of its own leaves this host.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # By default other processes of the host come first, also while a batch is timed.
        os.environ.setdefault(NICENESS, "0")
        options = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        # Ray's own handler would end the process before what was measured is stored.
        if handler is not None and current_thread() is main_thread():
            signal.signal(signal.SIGTERM, handler)


def _nodes() -> dict[str, Mapping[str, Any]]:
    """What Ray says of the nodes that are alive, by their names, which are unlike."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    shared = Counter(node["NodeName"] for node in alive)
    return {
        node["NodeName"]
        if shared[node["NodeName"]] == 1
        else f"{node['NodeName']}-{node['NodeID'][:6]}": node
        for node in alive
    }
