"""The decision log: sampled, whole lines, and never a fault of the engine's."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_tune import Batch, StoreError
from nsa_tune.engines import decision_log as module
from nsa_tune.engines.decision_log import SCHEMA, DecisionLog, read_decisions

BATCH = Batch.extend([1920, 0, 0], [128, 300, 300])
TABLE = {"gpu": "NVIDIA H200", "model": "deepseek-v3.2", "heads": 16, "kv_layout": "fp8_packed"}
OWN = {"prefill_path": "mha", "sparse_prefill": "flashmla_kv"}
TAKEN = {"prefill_path": "mla", "sparse_prefill": "flashmla_sparse"}


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _write(log: DecisionLog, batch: Batch = BATCH, count: int = 1) -> None:
    log.write(count, batch, own=OWN, taken=TAKEN, table=TABLE)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_documented_fields(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    _write(DecisionLog(path), count=7)

    (line,) = _lines(path)
    assert line.pop("pid") == os.getpid()
    assert isinstance(line.pop("time"), float)
    assert line == {
        "schema": SCHEMA, **TABLE, "count": 7, "batch": "extend:1920+128,0+300x2",
        "mode": "extend", "sequences": 3, "q_tokens": 728, "kv_tokens": 2648, "max_kv": 2048,
        "pairs": BATCH.pairs, "next_n": 1, "captured": False, "own": OWN, "taken": TAKEN,
    }  # fmt: skip


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    _write(DecisionLog(path), count=7)

    (decision,) = read_decisions(path)
    assert (decision.batch, decision.count, decision.own, decision.taken) == (BATCH, 7, OWN, TAKEN)
    assert (decision.gpu, decision.heads) == ("NVIDIA H200", 16)


@pytest.mark.parametrize(
    "batch",
    [
        Batch.extend(range(400), [3] * 400),
        Batch.from_totals(mode="extend", q_tokens=30, kv_tokens=90, max_kv=50, batch_size=3),
        Batch.from_totals(mode="decode", q_tokens=3, kv_tokens=90, max_kv=50, batch_size=3),
    ],
)
def test_a_batch_too_long_for_a_word_keeps_its_sums(batch: Batch, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    _write(DecisionLog(path), batch)

    (decision,) = read_decisions(path)
    names = ("mode", "batch_size", "q_tokens", "kv_tokens", "max_kv", "pairs", "next_n", "captured")
    assert decision.batch.lens is None
    assert [getattr(decision.batch, n) for n in names] == [getattr(batch, n) for n in names]


def test_lines_stand_for_all_that_went_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    log = DecisionLog(tmp_path / "d.jsonl")
    counts = []
    for _ in range(1000):
        clock.now += 0.01
        if count := log.due():
            counts.append(count)

    assert len(counts) == 20
    assert 1000 - sum(counts) < 50
    assert max(counts[1:]) <= 51


def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    code = (
        "import sys; from pathlib import Path; from nsa_tune import Batch\n"
        "from nsa_tune.engines.decision_log import DecisionLog\n"
        f"log = DecisionLog(Path({str(path)!r}))\n"
        "for i in range(300):\n"
        f"    log.write(1, Batch.extend([i], [1]), own={{}}, taken={{}}, table={TABLE!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]

    decisions = list(read_decisions(path))
    assert len(decisions) == 900
    assert sorted(d.batch.prefix_tokens for d in decisions) == sorted([*range(300)] * 3)


def test_half_a_line_of_a_lost_machine_costs_that_line_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d.jsonl"
    _write(DecisionLog(path))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    _write(DecisionLog(path), count=5)

    assert [decision.count for decision in read_decisions(path)] == [1, 5]
    assert "1 lines are no decisions" in caplog.text


def test_foreign_lines_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d.jsonl"
    _write(DecisionLog(path))
    good = json.loads(path.read_text())
    bad = [
        "[]", "{}", "null", "\x00\x00", json.dumps({**good, "schema": "nsa-tune/decision/2"}),
        json.dumps({**good, "batch": "extend:-1+2"}), json.dumps({**good, "heads": None}),
        json.dumps({**good, "batch": None, "q_tokens": 0}),
    ]  # fmt: skip
    path.write_text("\n".join([*bad, json.dumps(good), "", ""]))

    assert len(list(read_decisions(path))) == 1
    assert f"{len(bad)} lines are no decisions" in caplog.text


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no readable decision log"):
        list(read_decisions(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("kind", ["directory", "nowhere"])
def test_a_file_that_cannot_be_written_ends_the_log_with_one_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(tmp_path if kind == "directory" else tmp_path / "a" / "b")
    assert log.due() == 1
    _write(log)

    assert log.due() == 0
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_full_disk_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = DecisionLog(tmp_path / "d.jsonl")
    monkeypatch.setattr(os, "write", full)
    _write(log)

    assert log.due() == 0
    assert "No space left on device" in caplog.text


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    """Nobody may be reading it: a process of its own, for the engine would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    code = (
        "from pathlib import Path; from nsa_tune import Batch\n"
        "from nsa_tune.engines.decision_log import DecisionLog\n"
        f"log = DecisionLog(Path({str(tmp_path / 'pipe')!r}))\n"
        "for i in range(2000):\n"
        f"    log.write(1, Batch.extend([i], [1]), own={{}}, taken={{}}, table={TABLE!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip

    assert "it is no regular file" in done.stderr


def test_a_home_that_is_not_there_ends_the_log_when_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NSA_TUNE_LOG", "~no-such-user/d.jsonl")
    log = DecisionLog.from_environment()
    assert log is not None
    _write(log)

    assert log.due() == 0
    assert "~no-such-user" in caplog.text


def test_a_file_does_not_grow_beyond_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d.jsonl"
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "_MOST_BYTES", 2000)
    log = DecisionLog(path)
    written = 0
    while log.due():
        _write(log)
        written += 1

    assert 1 < written < 10
    assert path.stat().st_size <= 2000
    assert "it has reached 2000 bytes" in caplog.text


def test_the_environment_asks_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DecisionLog.from_environment() is None
    monkeypatch.setenv("NSA_TUNE_LOG", str(tmp_path / "d.jsonl"))
    log = DecisionLog.from_environment()
    assert log is not None
    _write(log)

    assert (tmp_path / "d.jsonl").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"count": "BIG"}, {"count": 10**400}, {"heads": "BIG"}, {"q_tokens": "BIG", "batch": None},
        {"batch": "extend:0+1x262144"}, {"batch": 5}, {"own": 5}, {"time": []},
    ],
    ids=range(8),
)  # fmt: skip
def test_a_line_that_lies_is_left_out(
    change: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    _write(DecisionLog(path))
    (line,) = _lines(path)
    text = json.dumps({**line, **change}).replace('"BIG"', "1e400")
    path.write_text(f"{json.dumps(line)}\n{text}\n{'[' * 60_000}\n")

    assert len(list(read_decisions(path))) == 1
    assert "2 lines are no decisions" in caplog.text


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")

    with pytest.raises(StoreError, match="not a regular file"):
        list(read_decisions(tmp_path / "log.jsonl"))


def test_a_line_without_end_ends_the_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    _write(DecisionLog(path))
    path.write_bytes(path.read_bytes() + b" " * 2**17)

    assert len(list(read_decisions(path))) == 1
    assert "line 2 has more than 65536 bytes" in caplog.text
