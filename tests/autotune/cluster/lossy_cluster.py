"""A run on a Ray of two nodes, of which a worker and a node are killed.

    python -m tests.autotune.cluster.lossy_cluster DATABASE

Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from nsa_tune.autotune.cluster.launcher import NICENESS, RayLauncher
from nsa_tune.autotune.runner.progress import Incident, NoProgress
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.records import Measurement
from tests.autotune.kills import processes_of

__all__ = ["REGISTRY"]

REGISTRY = "tests.autotune.cluster.tiny:TINY"
_WORKER_AFTER, _NODE_AFTER = 2, 5
"""Batches that are stored when the worker, and when the node, is killed."""


class Kills(NoProgress):
    """Kills a worker of one node, and later the other node, while both measure."""

    def __init__(self, cluster: Cluster, nodes: Sequence[Any]) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.incidents: list[Incident] = []
        self.done = 0

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        self.done = done
        if done == _WORKER_AFTER:
            os.kill(_worker_on(self.nodes[0]), signal.SIGKILL)
        if done == _NODE_AFTER:
            self.cluster.remove_node(self.nodes[1], allow_graceful=False)

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)


def _worker_on(node: Any) -> int:
    """Process id of the Ray worker that measures on `node`."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    (worker,) = (
        pid for pid in processes_of(raylet)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RayWorker")
    )  # fmt: skip
    return int(worker)


def main(database: str) -> None:
    """Run, and print what happened."""
    os.environ[NICENESS] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1, wait=False) for _ in range(2)]
    cluster.wait_for_nodes()
    kills = Kills(cluster, nodes)
    result = run(
        RunRequest(Path(database), model="tiny"), kills, registry=REGISTRY,
        launcher=RayLauncher(cluster.address),
    )  # fmt: skip
    told = {
        "outcome": result.outcome,
        "measured": result.measured,
        "failed": result.failed,
        "batches": kills.done,
        "incidents": [asdict(one) for one in kills.incidents],
        "units": [asdict(one) for one in result.units],
    }
    cluster.shutdown()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
