"""A `tiny` sweep on a Ray of two nodes, of which a worker and a node are killed.

    python -m tests.autotune.cluster.lossy_cluster DATABASE

Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from nsa_tune.autotune.cluster.launcher import NICENESS, RayLauncher
from nsa_tune.autotune.runner.progress import Incident, Progress, Stored
from nsa_tune.autotune.runner.run import RunRequest, run
from tests.autotune.kills import processes_of

POINTS = ("decode", "indexer_layout")
"""141 batches, which take a third of the time that all take."""
_WORKER_AFTER, _NODE_AFTER = 8, 40
"""The worker is killed when each node has measured so many batches; the node when so many more are
stored."""


class Kills(Progress):
    """Kills a worker of one node, and later the other node, while both measure."""

    def __init__(self, cluster: Cluster, nodes: Sequence[Any], database: Path) -> None:
        self.cluster, self.nodes, self._database = cluster, nodes, database
        self.incidents: list[Incident] = []
        self.done = 0
        self._worker_at: int | None = None
        self._node_at: int | None = None

    def batch(self, stored: Stored) -> None:
        self.done = done = stored.done
        if self._worker_at is None:
            with closing(sqlite3.connect(self._database)) as db:
                by_node = [batches for (batches,) in db.execute("SELECT batches FROM units")]
            if len(by_node) == 2 and min(by_node) >= _WORKER_AFTER:
                os.kill(_worker_on(self.nodes[0]), signal.SIGKILL)
                self._worker_at = done
        elif self._node_at is None and done >= self._worker_at + _NODE_AFTER:
            self.cluster.remove_node(self.nodes[1], allow_graceful=False)
            self._node_at = done

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)

    @property
    def killed_after(self) -> list[int | None]:
        """Batches that were stored when the worker, and when the node, was killed."""
        return [self._worker_at, self._node_at]


def _worker_on(node: Any) -> int:
    """Process id of the Ray worker that measures on `node`."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    (worker,) = (
        pid for pid in processes_of(raylet)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RayWorker")
    )  # fmt: skip
    return int(worker)


def _add_node(cluster: Cluster, core: int) -> Any:
    """A node with one CPU, whose processes run on `core` alone: as all of two nodes of one host,
    torch's threads would wait for each other most of the time."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return cluster.add_node(num_cpus=1, wait=False)
    finally:
        os.sched_setaffinity(0, ours)


def main(database: str) -> None:
    """Run, and print what happened."""
    os.environ[NICENESS] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cores = sorted(os.sched_getaffinity(0))
    nodes = [_add_node(cluster, cores[number % len(cores)]) for number in range(2)]
    cluster.wait_for_nodes()
    kills = Kills(cluster, nodes, Path(database))
    result = run(
        RunRequest(Path(database), model="tiny", points=POINTS), kills,
        launcher=RayLauncher(cluster.address),
    )  # fmt: skip
    told = {
        "points": POINTS,
        "outcome": result.outcome,
        "measured": result.measured,
        "failed": result.failed,
        "batches": kills.done,
        "killed_after": kills.killed_after,
        "incidents": [asdict(one) for one in kills.incidents],
        "units": [asdict(one) for one in result.units],
    }
    cluster.shutdown()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
