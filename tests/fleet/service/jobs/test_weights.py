"""Decision logs become weights of batches; what is sent twice counts once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.weighted_batches import weighted_batches
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.decision_log import DecisionLog
from nsa_tune.fleet.service.jobs import weights as module
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.jobs.weights import BatchWeights, Counted
from nsa_tune.fleet.service.state import State
from tests.fleet.service.made_up_tables import TARGET

WANTED = Target.of(TARGET)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[BatchWeights]:
    with State.open(tmp_path / "s.db") as state:
        yield BatchWeights(state)


def _add(weights: BatchWeights, log: bytes, by: str = "host") -> Counted:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(log)
        return weights.add(path, by)


def _line(new: int, count: int = 1, **changes: object) -> bytes:
    batch = Batch.extend([0], [new])
    line = {
        "schema": "nsa-tune/decision/1", "time": float(new), "pid": 7, **TARGET, "count": count,
        "batch": str(batch), "own": {}, "taken": {}, **changes,
    }  # fmt: skip
    return json.dumps(line).encode() + b"\n"


def _counts(weights: BatchWeights) -> dict[str, int]:
    lines = weights.log_for(WANTED).splitlines()
    return {json.loads(line)["batch"]: json.loads(line)["count"] for line in lines}


def test_a_log_that_an_engine_wrote_comes_back_as_a_trace(
    weights: BatchWeights, tmp_path: Path
) -> None:
    written = DecisionLog(tmp_path / "decisions.jsonl")
    for new, count in ((16, 5), (32, 2), (16, 1)):
        written.write(count, Batch.extend([0], [new]), own={}, taken={}, table=TARGET)
    assert weights.add(tmp_path / "decisions.jsonl", "host") == (8, 2)
    assert list(_counts(weights).items()) == [("extend:0+16", 6), ("extend:0+32", 2)]
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(weights.log_for(WANTED))
    assert {str(batch) for batch, _ in weighted_batches(trace)} == {"extend:0+16", "extend:0+32"}
    assert weights.log_for(Target.of({**TARGET, "heads": 16})) == b""


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True), st.data())
def test_a_log_that_grows_is_counted_line_by_line_however_often_it_is_sent(
    news: list[int], data: st.DataObject
) -> None:
    log = b"".join(_line(new) for new in news)
    with tempfile.TemporaryDirectory() as folder, State.open(Path(folder, "s.db")) as state:
        weights = BatchWeights(state)
        ends = data.draw(st.lists(st.integers(1, len(log)), max_size=4))
        total = 0
        for end in [*ends, len(log), len(log)]:
            if b"\n" in log[:end]:
                total += _add(weights, log[:end]).decisions
        assert total == len(news)
        assert _counts(weights) == {f"extend:0+{new}": 1 for new in news}


def test_what_cannot_be_measured_is_passed_over(weights: BatchWeights) -> None:
    sums = _line(64, 9, batch=None, mode="extend", sequences=1, q_tokens=64, kv_tokens=64,
                 max_kv=64, pairs=None, next_n=1, captured=False)  # fmt: skip
    unknown = _line(32, model="gpt")
    counted = _add(weights, _line(16) + sums + unknown + b"nonsense\n" + _line(16)[:30])
    assert counted == (11, 1)
    assert _counts(weights) == {"extend:0+16": 1}


@pytest.mark.parametrize("log", [b"", b"no end", b"nonsense\n", b"\n", b"{}\n", b"\x00\xff\n"])
def test_what_is_no_log_is_refused(log: bytes, weights: BatchWeights) -> None:
    with pytest.raises(UsageError, match="that is no decision log"):
        _add(weights, log)


@pytest.mark.parametrize("heads", [0, -1, 129, 2**63, -(2**63) - 1])
def test_heads_that_no_model_has_are_not_counted(heads: int, weights: BatchWeights) -> None:
    assert _add(weights, _line(1) + _line(2, heads=heads)) == (2, 1)
    assert _counts(weights) == {"extend:0+1": 1}


def test_a_batch_is_counted_up_to_a_limit(
    weights: BatchWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_COUNT", 5)
    _add(weights, _line(1, count=4) + _line(1, count=3) + _line(2, count=3))
    assert _counts(weights) == {"extend:0+1": 5, "extend:0+2": 3}
    _add(weights, _line(2, count=4))
    assert _counts(weights) == {"extend:0+1": 5, "extend:0+2": 5}


def test_the_rarest_are_forgotten(weights: BatchWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BATCHES", 2)
    _add(weights, b"".join(_line(new, count=new) for new in (3, 1, 2)))
    assert _counts(weights) == {"extend:0+3": 3, "extend:0+2": 2}


def test_one_log_adds_so_much_and_no_more(weights: BatchWeights) -> None:
    _add(weights, _line(1, count=2**30))
    assert _counts(weights) == {"extend:0+1": 10_000_000}


def test_junk_of_one_token_pushes_out_its_own_tables_alone(
    weights: BatchWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TABLES", 4)
    _add(weights, _line(1))
    for number in range(9):
        _add(weights, _line(2, gpu=f"junk{number}"), by="mallory")
    assert _counts(weights) == {"extend:0+1": 1}
    assert _add(weights, _line(3, gpu="another"), by="honest").decisions == 1
    kept = [gpu for gpu in [*(f"junk{i}" for i in range(9)), "another"]
            if weights.version(Target.of({**TARGET, "gpu": gpu}))]  # fmt: skip
    assert kept == ["junk7", "junk8", "another"]


def test_a_log_of_more_tables_than_engines_have_is_refused(weights: BatchWeights) -> None:
    with pytest.raises(UsageError, match="the log names 17 tables"):
        _add(weights, b"".join(_line(1, gpu=f"junk{number}") for number in range(17)))


def test_what_a_token_or_a_gpu_has_is_forgotten(weights: BatchWeights) -> None:
    _add(weights, _line(1))
    _add(weights, _line(2, gpu="junk"), by="mallory")
    assert weights.forget("", "") == 0
    assert weights.forget("mallory", "") == 1
    assert _counts(weights) == {"extend:0+1": 1}
    assert weights.forget("", "NVIDIA H200") == 1
    assert _counts(weights) == {}
