"""What an engine's start has measured becomes a prior if other engines can have its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.engine.priors import main
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.times.remembered import SHIPPED
from nsa_tune.reports.traffic.engine_passes import EnginePasses

_KEY: dict[str, Any] = {
    "gpu": "NVIDIA H200", "sglang": "0.5.23", "model": "deepseek-v3.2", "layers": 61, "heads": 16,
    "kv_dtype": "bf16", "draft_tokens": None, "prefill_sizes": [64 << i for i in range(8)],
}  # fmt: skip
_TIMES = (PassTime(PassMode.ENGINE, 64, 33, 15e3),)


def _exported(tmp_path: Path, **changes: Any) -> list[Path]:
    kept, out = tmp_path / "kept", tmp_path / "out"
    kept.mkdir()
    times = PassTimes(_KEY | changes, _TIMES, "a table", {"dense graphs": 306}, {"eager": "is off"})
    (kept / "0123.json").write_text(times.as_text(), encoding="utf-8")
    code = main([str(kept), "--out", str(out)])
    found = sorted(out.glob("*"))
    assert code == (0 if found else 1)
    return found


def test_times_are_exported_without_what_that_start_found_out(tmp_path: Path) -> None:
    (path,) = _exported(tmp_path)
    prior = PassTimes.from_text(path.read_text(encoding="utf-8"))
    assert path.name == "h200_sglang-0.5.23_deepseek-v3.2_h16_bf16.json"
    assert (prior.key, prior.times, prior.table) == (_KEY, _TIMES, "a table")
    assert not prior.verdicts and not prior.memory_mib


def test_a_model_cut_down_is_nobodys(tmp_path: Path) -> None:
    assert not _exported(tmp_path, layers=30)


def test_graph_sizes_of_a_harness_are_nobodys(tmp_path: Path) -> None:
    assert not _exported(tmp_path, prefill_sizes=[64, 512, 8192])


def test_a_run_of_the_harness_becomes_passes_of_an_engine(tmp_path: Path) -> None:
    result = max(Path("benchmarks/engine/results").glob("*16_bf16.json"))
    assert main([str(result), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*")

    passes = EnginePasses.read(path)
    assert path.name == f"{result.stem}_{passes.layers}_layers.json"
    assert passes.layers == json.loads(result.read_text())["options"]["layers"]
    ways = {(row.setup, row.way) for row in passes.passes}
    assert ways >= {
        ("default", PassMode.ENGINE),
        ("--dsa-prefill-backend fa3", PassMode.ENGINE),
        ("default", PassMode.EAGER),
        ("plug-in", PassMode.DENSE_GRAPH),
    }


def test_what_ships_can_be_read() -> None:
    for path in SHIPPED.glob("*.json"):
        assert PassTimes.from_text(path.read_text(encoding="utf-8")).times, path.name
