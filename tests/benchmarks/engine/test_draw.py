"""Random batches of traffic: what a scheduler makes of a trace, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.cases import PAGE, ragged_cases
from benchmarks.engine.draw import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 40 * i, "input_length": 700 + 300 * i, "output_length": 8,
         "hash_ids": [0, *range(100 * i, 100 * i + (700 + 300 * i) // 512)]}
        for i in range(1, 30)
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def _drawn(trace: Path, *options: str) -> list[str]:
    out = trace.with_name("batches.jsonl")
    assert main([str(trace), "--out", str(out), "--batches", "8", *options]) == 0
    return out.read_text().splitlines()


def test_batches_are_different_passes_of_the_trace_in_whole_pages(trace: Path) -> None:
    batches = ragged_cases(_drawn(trace, "--chunk", "4096"))

    assert len(set(batches)) == 8
    assert all(prefix % PAGE == 0 for batch in batches for prefix in batch.prefix)
    assert all(sum(batch.new) <= 4096 for batch in batches)
    assert max(len(batch.new) for batch in batches) > 1
    assert [batch.tokens for batch in batches] == sorted(batch.tokens for batch in batches)


def test_a_seed_names_the_batches(trace: Path) -> None:
    assert _drawn(trace, "--seed", "3") == _drawn(trace, "--seed", "3")
    assert _drawn(trace, "--seed", "3") != _drawn(trace, "--seed", "4")


def test_a_trace_with_too_few_passes_is_told(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trace.with_name("few.jsonl")

    assert main([str(trace), "--out", str(out), "--batches", "900"]) == 1
    assert f"{len(out.read_text().splitlines())} of" in capsys.readouterr().err


def test_traces_without_times_arrive_behind_what_is_warm(tmp_path: Path) -> None:
    trace = tmp_path / "chat.jsonl"
    lines = [
        {"segments": [["history", 1600]], "output_length": 1, "warm": True},
        *({"segments": [["history", 1600], [f"turn {i}", 20 + i]], "output_length": 9}
          for i in range(40)),
    ]  # fmt: skip
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    batches = ragged_cases(_drawn(trace, "--shuffle"))

    assert {prefix for batch in batches for prefix in batch.prefix} == {1536}
    assert all(new >= 84 for batch in batches for new in batch.new)
    assert [batch.tokens for batch in batches] != sorted(batch.tokens for batch in batches)
