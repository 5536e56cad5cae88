"""The harness on an engine without a GPU: what it measures is what that engine takes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import compare, profiling, ranks, run, soak
from benchmarks.engine.configurations import parsed
from benchmarks.engine.control import Control
from benchmarks.engine.probe import Settings
from benchmarks.engine.session import Session
from nsa_tune.engines.sglang.pass_mode import seconds
from tests.benchmarks.engine.fake_engine import FakeEngine, Mode, fake_events

_SPEED = {"default": 1.0, "plugin": 0.8, "eager": 1.5}
_CONFIGURATIONS = json.dumps([
    {"name": "default"},
    {"name": "plugin", "plugin": True},
    {"name": "eager", "prefill_graph": False},
])  # fmt: skip


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """Engines that were started, in place of SGLang's; plug-in calls go to a stand-in."""
    clock, started = fake_events(monkeypatch), []
    switch: Any = ModuleType("switch")
    switch.pause = switch.resume = lambda: None
    monkeypatch.setitem(sys.modules, "nsa_tune.engines.sglang.switch", switch)
    monkeypatch.setattr(run, "find_spec", lambda _: object())

    def gpu_ms(configuration: Any, batch: Any) -> float:
        # Prefill depends on the configuration, decode does not.
        tokens: int = sum(batch.extend_seq_lens_cpu or [1])
        return tokens * (_SPEED[configuration.name] if batch.forward_mode is Mode.EXTEND else 1.0)

    def start(**_: Any) -> FakeEngine:
        settings = Settings.from_environment()
        assert settings is not None
        started.append(FakeEngine(settings, clock, gpu_ms))
        return started[-1]

    monkeypatch.setattr(run, "import_module", lambda _: SimpleNamespace(Engine=start))
    yield started
    for one in started:
        assert one.closed


def _measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    arguments = ["--out", str(tmp_path / "out"), "--configurations", _CONFIGURATIONS, *options]
    run.main([*arguments, "--max-total", "9999"])
    found: dict[str, Any] = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["schema"] == "nsa-tune/engine/1"
    return found


def test_a_result_has_what_the_plug_in_says_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = {"recording": 2.5, "timing passes": 1.0, seconds.ENGINE: 9.0}
    monkeypatch.setattr(seconds, "SECONDS", took_s)
    monkeypatch.setattr(run, "_said", lambda *_: "31000\n4")
    assert run._start(f"at the last start: {seconds.split()}") == {
        "used_mib": [31000, 4], "by_rank": [took_s | {"the plug-in in all": 3.5}]
    }  # fmt: skip
    assert run._start("") == {"used_mib": [31000, 4]}


def test_prefill_is_paired_with_the_default(tmp_path: Path, engines: list[FakeEngine]) -> None:
    found = _measured(tmp_path, "--tests", "prefill", "--grid", "0:300:1,64:100:3,8192:8192:1")

    first, second, third = found["tests"]["prefill"]
    default, plugin, eager = (
        first["configurations"][name] for name in ("default", "plugin", "eager")
    )
    assert (default["gpu_ms"], default["peak_mib"]) == (300, 5)
    assert plugin["gpu_ratio"]["median"] == pytest.approx(0.8)
    assert (plugin["verdict"], eager["verdict"]) == ("win", "loss")
    assert eager["ran"] == ["flashmla_kv eager"]
    assert second["prefix"] == [64] * 3 and second["as_asked"] and "skipped" in third
    default = second["configurations"]["default"]
    assert (default["gpu_ms"], default["ran"]) == (300, ["mha graph"])


def test_keys_are_selected_by_content_where_tokens_repeat(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    (trace := tmp_path / "long.jsonl").write_text('{"segments": [["a", 9]], "output_length": 1}')
    options = ("--grid", "0:64:1:0.5,0:64:1", "--trace", f"{trace}=default,eager=0.5=3")
    found = _measured(tmp_path, "--tests", "prefill,trace", *options)["tests"]
    rows = found["trace"][0]["configurations"]
    assert {one: rows[one]["rounds"] for one in rows} == {"default": 3, "eager": 3}
    assert [on for on, _ in groupby(engines[0].by_content)] == [False, True] * 2


def test_states_of_prefills_are_compared_row_by_row(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"plugin": 0.01}
    start = FakeEngine.__init__

    def differing(self: FakeEngine, *rest: Any) -> None:
        start(self, *rest)
        self.error = lambda configuration: errors.get(configuration.name, 0.0)

    monkeypatch.setattr(FakeEngine, "__init__", differing)
    found = _measured(tmp_path, "--tests", "states", "--state-cases", "64:5:3,0:7:1")

    first, second = found["tests"]["states"]
    assert first["case"] == "64+5 x3"
    assert first["configurations"]["another last page"]["compared"] == 3
    assert "another last page" not in second["configurations"], "there is no prefix to change"
    default, plugin = (first["configurations"][name] for name in ("default", "plugin"))
    assert (default["compared"], plugin["compared"], plugin["same_best_token"]) == (3, 3, 3)
    assert default["hidden_states"] == {"rows": 15, "not_finite": 0, "median": 0, "largest": 0}
    assert plugin["hidden_states"]["median"] == pytest.approx(0.01)
    assert plugin["logits"]["rows"] == 3
    assert default["kl_nats"] == {"median": 0, "largest": 0}
    assert plugin["ran"] == ["mha graph"]
    assert second["configurations"]["plugin"]["hidden_states"]["rows"] == 7
    assert not list((tmp_path / "out" / "kept").iterdir())


def test_decode_counts_full_steps_only(tmp_path: Path, engines: list[FakeEngine]) -> None:
    options = ("--tests", "decode", "--decode-batches", "2:64,200", "--decode-tokens", "10")
    small, large = _measured(tmp_path, *options)["tests"]["decode"]

    assert set(small["configurations"]) == {"default", "plugin"} and "skipped" in large
    assert small["configurations"]["plugin"]["gpu_ms"] == 1
    assert small["configurations"]["default"]["mode"] == "DECODE"


def test_a_trace_is_replayed_in_each_configuration(
    tmp_path: Path, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "small.jsonl"
    trace.write_text(
        '{"segments": [["head", 128]], "output_length": 1, "warm": true}\n'
        '{"segments": [["head", 128], ["turn 1", 40]], "output_length": 3, "session": 1}\n'
        '{"segments": [["head", 128], ["turn 2", 60]], "output_length": 3, "session": 1}\n'
    )
    (row,) = _measured(tmp_path, "--tests", "trace", "--trace", str(trace))["tests"]["trace"]

    assert row["requests"] == 2 and row["warm_tokens"] == 128 and row["prompt_tokens"] == 356
    # The prefix is cached, the turns are new in each replay.
    assert row["configurations"]["default"]["prefill_gpu_ms"] == 100
    assert row["configurations"]["plugin"]["prefill_gpu_ms"] == pytest.approx(80)
    assert {run["prefill_passes"] for run in row["runs"]} == {2}
    assert compare.main([str(tmp_path / "out" / "result.json")]) == 0
    assert "Trace small" in capsys.readouterr().out


def test_outputs_that_differ_are_found(tmp_path: Path, engines: list[FakeEngine]) -> None:
    same, other = _outputs(tmp_path, engines, differs=False)
    assert same["share_equal"] == other["share_equal"] == 1
    same, other = _outputs(tmp_path, engines, differs=True)
    assert same["share_equal"] == 1
    assert 0 < other["share_equal"] < 1
    assert other["first_difference"]["positions"] == {"0": other["requests"] - other["equal"]}
    assert other["gap_nats"]["where answers part"] == pytest.approx(0.001)


def _outputs(
    tmp_path: Path, engines: list[FakeEngine], *, differs: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    start = vars(run)["import_module"]("sglang").Engine

    def started(**named: Any) -> FakeEngine:
        engine: FakeEngine = start(**named)
        own = engine.said
        engine.said = lambda c, ids: own(c, ids) + (differs and c.plugin and ids[0] % 2)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "import_module", lambda _: SimpleNamespace(Engine=started))
        options = ("--tests", "outputs", "--outputs", "20")
        rows = _measured(tmp_path, *options)["tests"]["outputs"]
    assert [row["configuration"] for row in rows] == ["default", "plugin"]
    return rows[0], rows[1]


def test_a_test_that_fails_is_noted_and_the_next_one_runs(
    tmp_path: Path, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    found = _measured(tmp_path, "--tests", "trace,prefill", "--grid", "0:64:1", "--trace", "none")
    assert "FileNotFoundError" in found["errors"]["trace"]
    assert len(found["tests"]["prefill"]) == 1
    assert "FileNotFoundError" in capsys.readouterr().err


def test_a_batch_that_the_cache_cannot_hold_is_refused_before_an_engine_starts(
    tmp_path: Path, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    batches = tmp_path / "batches.jsonl"
    batches.write_text('{"prefix": [3000], "new": [90]}\n')
    with pytest.raises(SystemExit):
        run.main(["--batches", str(batches), "--out", str(tmp_path)])

    assert "whole pages of 64 tokens: (3000,)" in capsys.readouterr().err
    assert engines == []


def test_an_engine_that_does_not_start_is_noted(tmp_path: Path, engines: list[FakeEngine]) -> None:
    def broken(**_: Any) -> None:
        raise MemoryError("too large")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "import_module", lambda _: SimpleNamespace(Engine=broken))
        with pytest.raises(MemoryError):
            _measured(tmp_path)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["errors"] == {"start": "MemoryError: too large"}


def test_no_case_starts_once_time_is_up(tmp_path: Path, engines: list[FakeEngine]) -> None:
    found = _measured(tmp_path, "--tests", "prefill", "--grid", "0:64:1", "--seconds", "0")
    assert found["tests"]["prefill"] == [{"case": "0+64 x1", "skipped": "out of time"}]


def test_an_engine_without_the_probe_is_told(tmp_path: Path, engines: list[FakeEngine]) -> None:
    settings = Settings(tmp_path / "control", tmp_path / "none", parsed(_CONFIGURATIONS))
    control = Control.create(settings.control)
    silent = SimpleNamespace(generate=lambda **_: [])
    session = Session(silent, settings, control, deadline=0, capacity=9)
    with pytest.raises(RuntimeError, match="writes no passes"):
        session.collect()


def test_prompts_repeat_tokens_as_often_as_is_asked(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "control", tmp_path / "none", parsed(_CONFIGURATIONS))
    control = Control.create(settings.control)

    def repeated(share: float | None) -> float:
        session = Session(None, settings, control, deadline=0, capacity=9)
        ids = session.tokens(5000, "a prompt", share)
        assert ids == session.tokens(5000, "a prompt", share)
        return sum(a == b for a, b in pairwise(ids)) / 5000

    assert max(repeated(0.0), repeated(None)) < 0.01
    assert repeated(0.9) == pytest.approx(0.9, abs=0.02)


def test_batches_go_to_each_data_parallel_rank(tmp_path: Path) -> None:
    """With one rank idle SGLang would run no graph on any."""
    loop = asyncio.new_event_loop()
    asked: list[int] = []

    async def answer(*, routed_dp_rank: int, **_: Any) -> list[dict[str, int]]:
        asked.append(routed_dp_rank)
        return [{"rank": routed_dp_rank}]

    settings = Settings(tmp_path / "control", tmp_path / "none", parsed(_CONFIGURATIONS))
    control = Control.create(settings.control)
    engine = SimpleNamespace(async_generate=answer, loop=loop)
    session = Session(engine, settings, control, deadline=0, capacity=9, data_parallel=2)

    assert session.ask([[1]])[1] == [{"rank": 0}]
    assert sorted(asked) == [0, 1]
    loop.close()


def test_the_soak_sees_tables_come_and_go(
    tmp_path: Path, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.db"
    table.write_bytes(b"good")
    options = ("--tests", "soak", "--soak-seconds", "1", "--soak-table", str(table))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "_EVENT_EVERY_S", 0.01)
        patch.setattr(soak, "_LONGEST", 64)
        patch.setattr(soak, "_ROW_EVERY_S", 0.3)
        *earlier, last = _measured(tmp_path, *options)["tests"]["soak"]
    assert earlier and last["requests"] > earlier[0]["requests"] > 0
    assert last["wrong_answers"] == [] and last["passes"] > last["requests"] // 16
    assert sum(last["ways"].values()) > 0
    assert last["table_events"]["corrupt"] >= 1
    (used, reserved, allocated, peak, _, logits), *_ = earlier[0]["curve"]
    assert (used, reserved, allocated, peak) == (8, 6, 4, 5) and logits > 0
    assert table.read_bytes() == b"good"
    assert compare.main([f"one={tmp_path / 'out' / 'result.json'}"]) == 0
    assert "reserved_mib" in capsys.readouterr().out


def test_profiles_come_with_the_lengths_of_their_batch(
    tmp_path: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_gpu(call: Any, facts: dict[str, Any]) -> Any:
        facts["kernels"] = profiling.summary_of([(0, 7_000_000)])
        return call()

    monkeypatch.setattr(profiling, "_with_kernels", on_gpu)
    options = ("--tests", "profile", "--profile-cases", "64:128:2,0:9:1", "--host-cases", "1")
    rows = _measured(tmp_path, *options)["tests"]["profile"]

    assert [row["configuration"] for row in rows] == ["default", "plugin"] * 2
    assert rows[0]["busy_ms"] == rows[0]["total_ms"] == 7.0
    assert rows[0]["prefix"] == [64, 64] and rows[2]["new"] == [9]
    assert rows[1]["python"]["functions"] and "python" not in rows[2]


def test_a_test_has_a_share_of_the_time_and_another_go(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    options = ("--tests", "prefill:0,prefill,prefill", "--grid", "0:64:1")
    rows = _measured(tmp_path, *options)["tests"]["prefill"]

    assert rows[0] == {"case": "0+64 x1", "skipped": "out of time"}
    assert [row["case"] for row in rows[1:]] == ["0+64 x1"]


# 1.5 times the default is 1.9 times the plug-in, against which flags are not held.
@pytest.mark.parametrize(("within", "samples"), [("1.4", 1), ("1.6", 3)])
def test_slow_configurations_are_left_out_after_two_sweeps(
    tmp_path: Path, engines: list[FakeEngine], within: str, samples: int
) -> None:
    options = ["--tests", "loaded", "--load", "1", "--grid", "0:64:1", "--within", within]
    (row,) = _measured(tmp_path, *options, "--repeat", "3")["tests"]["loaded"]

    found = {name: one["samples"] for name, one in row["configurations"].items()}
    assert found == {"default": 3, "plugin": 3, "eager": samples}


def test_ranks_run_mixed_batches_in_every_configuration(
    tmp_path: Path, engines: list[FakeEngine]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_LONGEST", 64)
        patch.setattr(ranks, "_LONGEST_HEAD", 3)
        patch.setattr(ranks, "_AFTER_S", (0.0,))
        options = ("--tests", "ranks", "--rank-passes", "300")
        (row,) = _measured(tmp_path, *options)["tests"]["ranks"]
    assert compare.main([str(tmp_path / "out" / "result.json")]) == 0
    mine = row["by_rank"]["0"]
    assert mine["passes"] >= 300 and row["differences"] == row["wrong_answers"] == 0
    assert mine["prefills"]["graph"] and mine["prefills"]["eager"]
