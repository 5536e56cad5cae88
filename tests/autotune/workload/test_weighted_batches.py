"""Weighted batches: drawn with a seed, extends and decodes, as often as they occur."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from nsa_tune import Batch, UsageError
from nsa_tune.autotune.workload.weighted_batches import weighted_batches
from nsa_tune.engines.decision_log import DecisionLog

TABLE = {"gpu": "H", "model": "deepseek-v3.2", "heads": 128, "kv_layout": "fp8_packed"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = [
        {
            "timestamp": 100 * i, "input_length": 300 + 137 * i % 5000, "output_length": 5 + i % 50,
            "hash_ids": [0, i],
        }
        for i in range(300)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def decisions(path: Path, counts: dict[str, int]) -> Path:
    log = DecisionLog(path)
    for word, count in counts.items():
        log.write(count, Batch.parse(word), own={}, taken={}, table=TABLE)
    return path


def test_a_trace_gives_extends_and_decodes_of_several_next_n(trace: Path) -> None:
    batches = [batch for batch, _ in weighted_batches(trace)]

    assert {batch.mode.value for batch in batches} == {"extend", "target_verify"}
    assert {batch.next_n for batch in batches if batch.mode == "target_verify"} == {2, 3, 4}
    assert any(len(set(batch.lens or ())) > 1 for batch in batches), "none is ragged"


def test_the_same_seed_draws_the_same_batches(trace: Path) -> None:
    assert weighted_batches(trace, seed=3) == weighted_batches(trace, seed=3)
    assert weighted_batches(trace, seed=3) != weighted_batches(trace, seed=4)


def test_no_more_are_drawn_than_asked_for(trace: Path) -> None:
    found = weighted_batches(trace, drawn=7)

    assert sum(weight for _, weight in found) == 14


def test_a_decision_log_is_drawn_by_its_counts(tmp_path: Path) -> None:
    path = decisions(tmp_path / "log", {"extend:0+300": 900, "extend:0+301": 100})

    weights = {str(batch): weight for batch, weight in weighted_batches(path, drawn=1000)}

    assert sum(weights.values()) == 1000
    assert 850 < weights["extend:0+300"] < 950


def test_a_log_s_decodes_and_extends_are_drawn_separately(tmp_path: Path) -> None:
    path = decisions(tmp_path / "log", {"extend:0+300": 1, "decode:n1:100": 10_000})

    weights = Counter({batch.mode.value: w for batch, w in weighted_batches(path, drawn=20)})

    assert weights == {"extend": 20.0, "decode": 20.0}


def test_a_log_of_sums_only_has_nothing_to_measure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sums = Batch.from_totals(mode="extend", q_tokens=10, kv_tokens=20, max_kv=20)
    DecisionLog(path).write(1, sums, own={}, taken={}, table=TABLE)

    with pytest.raises(UsageError, match="no batch with the lengths"):
        weighted_batches(path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        weighted_batches(tmp_path / "none")
