"""Files of measured passes: those that ship are sound, others are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.reports.traffic.engine_passes import (
    EnginePasses,
    own_passes,
    passes_for,
    shipped_passes,
)
from tests.reports.traffic.deployments import H200, dispatcher

KEY = {
    "gpu": H200, "model": "deepseek-v3.2", "layers": 61, "heads": 16, "kv_dtype": "fp8",
    "sglang": "0.5.20", "draft_tokens": None,
}  # fmt: skip
OWN = PassTimes(
    KEY,
    [
        PassTime(PassMode.ENGINE, size, size // 2, 50_000.0 + 20 * size)
        for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    ],
)


def test_each_shipped_file_says_where_it_comes_from() -> None:
    found = shipped_passes()

    assert {(one.key["heads"], one.key["kv_dtype"]) for one in found} >= {
        (heads, kv) for heads in (8, 16, 32, 128) for kv in ("bf16", "fp8")
    }
    for one in found:
        assert {"gpu", "engine", "version", "model", "layers", "heads", "kv_dtype"} <= set(one.key)
        assert "docs/" in one.source
        assert any(row.setup == "plug-in" for row in one.passes)


def test_of_several_files_that_with_the_models_layers_is_taken() -> None:
    found = passes_for(dispatcher(16, "fp8").setting)
    half = passes_for(dispatcher(16, "fp8", layers=30).setting)

    assert found is not None
    assert half is not None
    assert (found.layers, half.layers) == (61, 30)


def test_what_the_plugin_measured_replaces_what_ships_but_for_decodes() -> None:
    assert remembered.save(OWN)

    found = passes_for(dispatcher(16, "fp8").setting)

    assert found is not None
    assert "that the plug-in measured" in found.source
    extends = [one for one in found.passes if one.batch.mode == "extend"]
    assert len(extends) == len(OWN.times)
    assert len(found.passes) > len(extends)


def test_passes_of_as_many_layers_of_all_releases_count() -> None:
    found = passes_for(dispatcher(16, "bf16").setting)

    assert found is not None
    assert "sglang 0.5.17" in found.source
    assert "sglang 0.5.23" in found.source
    assert found.key["version"] == "0.5.23"
    ways = {row.way for row in found.passes}
    assert {PassMode.SPARSE_GRAPH, PassMode.DENSE_GRAPH, PassMode.ENGINE} <= ways


@pytest.mark.parametrize(
    ("time", "word"),
    [
        (PassTime(PassMode.ENGINE, 8192, 1025, 1.0), "extend:0+2048x4"),
        (PassTime(PassMode.ENGINE, 8192, 1793, 1.0), "extend:1536+512x16"),
        (PassTime(PassMode.DENSE_MLA_GRAPH, 8192, 1985, 1.0), "extend:1920+128x64"),
        (PassTime(PassMode.ENGINE, 2048, 17409, 1.0, selects=True), "extend:16384+2048"),
        (PassTime(PassMode.SPARSE_GRAPH, 2048, 17409, 1.0), "extend:16384+2048"),
        (PassTime(PassMode.ENGINE, 8192, 257, 1.0, padding=4096), "extend:0+512x8"),
    ],
)
def test_a_measured_pass_is_the_batch_that_ran(time: PassTime, word: str) -> None:
    assert str(own_passes(PassTimes(KEY, [time]), "x").passes[0].batch) == word


def test_a_given_file_of_another_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(PassTimes({**KEY, "heads": 8}, OWN.times).as_text())

    with pytest.raises(UsageError, match="heads is 8 and not 16"):
        passes_for(dispatcher(16, "fp8").setting, path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"schema": "nsa-tune/engine-passes/1"}', "[" * 100_000,
        json.dumps({
            "schema": "nsa-tune/engine-passes/1", "source": {"page": "p"},
            "key": {"engine": "e", "version": "1", "layers": 1},
            "passes": [["extend:0+1", "default", "engine", -1]],
        }),
    ],
)  # fmt: skip
def test_another_file_is_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)

    with pytest.raises(UsageError, match="has no times of passes"):
        EnginePasses.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read"):
        EnginePasses.read(tmp_path / "nowhere.json")
