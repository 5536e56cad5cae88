"""The model of the rest of a pass: what it says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa_tune import UsageError
from nsa_tune.reports.replay.rest import RestOfPass

MODEL: dict[str, Any] = {
    "schema": "nsa-tune/rest-of-pass/1",
    "what": "made up",
    "attention": ["prefill"],
    "gpu_ms": {"graph": {"pass": 5, "q_tokens": 0.01}, "decode": {"pass": 8, "batch_size": 0.5}},
    "host_ms": {"eager": 170},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rest.json"


def test_a_pass_takes_its_attention_and_the_rest(file: Path) -> None:
    file.write_text(json.dumps(MODEL))
    rest = RestOfPass.read(file)

    assert rest.ms("graph", 7.0, (1, 1000, 1000, 1000, 500_500)) == pytest.approx(22)
    assert rest.ms("decode", 1.0, (4, 4, 4000, 1000, 4000)) == pytest.approx(11)


def test_a_graph_runs_its_padding_too(file: Path) -> None:
    file.write_text(json.dumps({**MODEL, "gpu_ms": {"graph": {"q_tokens": 1, "scored_tokens": 1}}}))
    rest = RestOfPass.read(file)

    assert rest.ms("graph", 0.0, (1, 1000, 1000, 1000, 500_500), padding=24) == 2024


def test_no_pass_takes_less_than_its_host(file: Path) -> None:
    file.write_text(json.dumps(MODEL))

    assert RestOfPass.read(file).ms("eager", 7.0, (1, 1000, 1000, 1000, 500_500)) == 170


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "nsa-tune/rest-of-pass/9"}, "its schema"),
        ({"gpu_ms": {}}, "has none of"),
        ({"gpu_ms": {"graph": {"tokens": 1}}}, "unknown tokens"),
        ({"gpu_ms": {"graph": {"pass": -1}}}, "at least 0"),
        ({"host_ms": {"graph": "fast"}}, "fast"),
        ({"kv_dtype": "fp4"}, "not bf16 or fp8"),
        ({"attention": None}, "no model of the rest"),
        ({"scored_above": float("inf")}, "no model of the rest"),
        ({"gpu_ms": {"graph": {"pass": 10**400}}}, "no model of the rest"),
    ],
)
def test_what_is_no_model_is_refused(file: Path, change: dict[str, Any], words: str) -> None:
    file.write_text(json.dumps({**MODEL, **change}))

    with pytest.raises(UsageError, match=words):
        RestOfPass.read(file)


def test_a_file_that_is_no_json_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        RestOfPass.read(file)
    for text in ("{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(UsageError, match="is not JSON"):
            RestOfPass.read(file)


def test_each_kv_format_has_a_rest_of_its_own(tmp_path: Path) -> None:
    paths = {}
    for name, change in {
        "fp8": {"kv_dtype": "fp8"},
        "any": {},
        "bf16": {"kv_dtype": "bf16"},
    }.items():
        paths[name] = tmp_path / name
        paths[name].write_text(json.dumps({**MODEL, "what": name, **change}))

    def found(kv_dtype: str, *names: str) -> str | None:
        one = RestOfPass.read_for([paths[name] for name in names], kv_dtype)
        return None if one is None else one.what

    assert found("bf16", "fp8", "any", "bf16") == "bf16"
    assert found("bf16", "fp8", "any") == "any"
    assert found("bf16") is None
    with pytest.raises(UsageError, match="for a KV pool in bf16"):
        found("bf16", "fp8")
