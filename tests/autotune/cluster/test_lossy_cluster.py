"""A real Ray of two nodes: a worker and a node are killed, and the whole table is there."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nsa_tune.autotune.runner.run import RunRequest, run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_run_loses_a_worker_and_a_node_and_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, alone = tmp_path / "ray.db", tmp_path / "alone.db"
    command = [sys.executable, "-m", "tests.autotune.cluster.lossy_cluster", str(database)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as cluster:  # fmt: skip
        out, err = cluster.communicate()
    assert cluster.returncode == 0, err[-3000:]

    told = json.loads(out.splitlines()[-1])
    # The tiny profile's tensors are so small that a second thread only makes them slower.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    local = run(RunRequest(alone, device="cpu", model="tiny", points=tuple(told["points"])))
    expected = sorted((row.point, row.batch, row.arm) for row in local.table.measurements)
    with closing(sqlite3.connect(database)) as db:
        stored = db.execute("select point, batch, arm from measurements").fetchall()
        keys = db.execute("select digest from keys").fetchall()
    assert sorted(stored) == expected
    assert keys == [(local.table.key.digest,)]
    assert (told["outcome"], told["measured"], told["failed"]) == ("done", len(expected), 0)

    assert None not in told["killed_after"]
    assert max(told["killed_after"]) < told["batches"]
    lost = [
        one["text"].partition(" is lost")[0]
        for one in told["incidents"]
        if one["kind"] == "unit_lost"
    ]
    batches = {unit["unit"]: unit["batches"] for unit in told["units"]}
    assert sorted(lost) == sorted(batches)
    assert sum(batches.values()) == told["batches"] == len({row[:2] for row in expected})
    assert min(batches.values()) > 0
