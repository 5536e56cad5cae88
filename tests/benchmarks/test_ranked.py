"""ranked.py: made-up runs whose passes take just what they are priced at, or something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ranked
from nsa_tune import Batch
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.reports.replay.whole_prefills import EAGER, ENGINE, PLUGIN, WholePrefills
from tests.reports.replay.test_prices import pricer
from tests.reports.replay.test_whole_prefills import made_up

CONFIGURATIONS: list[dict[str, Any]] = [
    {"name": "default", "plugin": False, "prefill_impl": None, "prefill_graph": True},
    {"name": "plugin", "plugin": True, "prefill_impl": None, "prefill_graph": True},
    {"name": "eager", "plugin": False, "prefill_impl": None, "prefill_graph": False},
    {"name": "odd", "plugin": True, "prefill_graph": True, "pass_mode": "eager"},
]
SETUPS = (ENGINE, PLUGIN, EAGER)
BATCHES = [Batch.extend([0], [900]), Batch.extend([8192], [100]), Batch.extend([8192], [1000])]


@pytest.fixture
def prices() -> ranked.Prices:
    return ranked.Prices(pricer(), WholePrefills(made_up(), pricer(), source="made up"))


def run(folder: Path, prices: ranked.Prices, factors: tuple[float, float, float]) -> dict[str, Any]:
    """Write a run in which a setup's passes take its prices times its factor."""
    lines: list[dict[str, Any]] = []
    rows = []
    runs = []
    tag = 0
    for number, (setup, factor) in enumerate(zip(SETUPS, factors, strict=True)):
        own: list[dict[str, Any]] = []
        for batch in BATCHES:
            ((prefix, new),) = batch.lens or ()
            took = prices.of(batch)[setup]
            ms = took.us / 1e3 * factor
            line = {
                "ctl": number, "mode": "EXTEND", "bs": 1, "prefix": [prefix], "new": [new],
                "gpu_ms": ms, "host_ms": 1.0, "graph": True, "draft": False,
            }  # fmt: skip
            if setup == PLUGIN:
                line["pass_mode"] = took.way
            own.append(line)
        lines += [{**one, "tag": tag, "gpu_ms": 9 * one["gpu_ms"]} for one in own]  # it compiles
        lines += [{**one, "tag": tag + 1} for one in own]
        tag += 2
        runs.append(
            {
                "configuration": CONFIGURATIONS[number]["name"], "prefill_passes": len(own),
                "prefill_gpu_ms": round(sum(one["gpu_ms"] for one in own), 2),
            }
        )  # fmt: skip
    for batch in BATCHES:
        ((prefix, new),) = batch.lens or ()
        took_ms = {
            one["name"]: {"gpu_ms": prices.of(batch)[setup].us / 1e3 * factor}
            for one, setup, factor in zip(CONFIGURATIONS, SETUPS, factors, strict=False)
        }
        rows.append(
            {
                "case": f"{prefix}+{new} x1", "prefix": [prefix], "new": [new], "passes": 1,
                "as_asked": True, "configurations": took_ms,
            }
        )  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "passes.jsonl").write_text(text)
    return {
        "label": "made up", "kv_dtype": "fp8", "configurations": CONFIGURATIONS,
        "options": {"heads": 16, "as_layers": 61}, "gpu": {"name": "NVIDIA H200"},
        "tests": {"prefill": rows, "trace": [{"trace": "chat", "runs": runs}, {"trace": "none"}]},
    }  # fmt: skip


def test_passes_that_take_their_price_are_ranked_alike(
    tmp_path: Path, prices: ranked.Prices, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, prices, (1.0, 1.0, 1.0))

    found, batches, _ = ranked.compared(tmp_path, result, prices)

    for name in ("default", "plugin"):
        assert found["passes"][name]["all"]["passes"] == len(BATCHES)
        assert found["passes"][name]["all"]["worst"] == pytest.approx(0, abs=1e-9)
    assert found["decided_alike"] == {"passes": 3, "of": 3}
    over, trace = found["rankings"]
    assert over["agree"]
    assert trace["agree"]
    assert over["measured_ms"] == pytest.approx(over["priced_ms"])
    assert trace["measured_ms"] == pytest.approx(trace["priced_ms"], abs=0.02)
    assert len(batches) == len(BATCHES)
    assert "3 of 3 pairs in the measured order" in capsys.readouterr().out


def test_an_engine_that_takes_longer_than_its_price_is_told(
    tmp_path: Path, prices: ranked.Prices
) -> None:
    result = run(tmp_path, prices, (1.25, 1.0, 0.1))

    found, batches, _ = ranked.compared(tmp_path, result, prices)

    assert found["passes"]["default"]["all"]["median"] == pytest.approx(0.2)
    assert found["passes"]["default"]["all"]["mean"] == pytest.approx(-0.2)
    over, _ = found["rankings"]
    assert not over["agree"]
    both = ranked.over_batches(ranked._joined({"fp8": batches, "bf16": batches}), " of all runs")
    assert both is not None
    assert len(both.measured_ms) == 6
    assert next(iter(both.lines())).startswith("3 batches of all runs: measured ")


def test_configurations_that_replay_does_not_know_are_left_out() -> None:
    assert [ranked.setup_of(one) for one in CONFIGURATIONS] == [ENGINE, PLUGIN, EAGER, None]
    kernel = {**CONFIGURATIONS[0], "prefill_impl": "fa3"}
    assert ranked.setup_of(kernel) == "--dsa-prefill-backend fa3"


def test_a_run_is_read_from_its_folder(
    tmp_path: Path,
    prices: ranked.Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(tmp_path, prices, (1.0, 1.0, 1.0))
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "times.json").write_text(made_up().as_text())
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", [
        "ranked", str(tmp_path), "--pass-times", str(tmp_path / "times.json"), "--json", str(out),
    ])  # fmt: skip

    assert ranked.main() == 0

    document = json.loads(out.read_text())
    assert document["schema"] == ranked.SCHEMA
    assert document["runs"][0]["rankings"][0]["agree"]
    assert "default, whole prefills: 0.0% off" in capsys.readouterr().out


def test_runs_of_one_kv_format_count_together_each_by_its_own_times(
    tmp_path: Path,
    prices: ranked.Prices,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    files = tmp_path / "one.json", tmp_path / "other.json"
    twice = [replace(one, pass_us=2 * one.pass_us) for one in made_up().times]
    for number, (folder, file) in enumerate(zip(folders, files, strict=True)):
        folder.mkdir()
        result = run(folder, prices, (1.0 + number, 1.0 + number, 1.0 + number))
        for row in result["tests"]["prefill"]:
            row["case"] += f" in run {number}"
        (folder / "result.json").write_text(json.dumps(result))
        file.write_text(PassTimes(made_up().key, twice if number else made_up().times).as_text())
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", [
        "ranked", *map(str, folders), "--pass-times", *map(str, files), "--json", str(out),
    ])  # fmt: skip

    assert ranked.main() == 0

    together = json.loads(out.read_text())["by_kv_dtype"]["fp8"]
    default = together["passes"]["default"]
    assert default["all"]["passes"] == 2 * len(BATCHES)
    assert default["all"]["worst"] == pytest.approx(0, abs=1e-9)
    assert default["again"]["median"] == pytest.approx(1 - 1 / 9)  # the first one compiled
    assert together["ranking"]["what"] == f"{2 * len(BATCHES)} batches, fp8"
    assert "fp8, 2 runs together" in capsys.readouterr().out
