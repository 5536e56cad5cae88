"""benchmarks/passes.py: whose pass is compared with whose, and what is said of them; no GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks import passes
from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.exchange import write_text

CPU = torch.device("cpu")
H200 = {"gpu": "NVIDIA H200", "model": "deepseek-v3.2", "heads": 128}
ALIKE = dict.fromkeys(("flashmla_sparse", "triton", "flashmla_kv_grouped", "flashmla_kv"), 1.0)


class Told:
    """Passes that take what they are told."""

    layers = 61
    flush_us = 40.0

    def __init__(self, us: dict[str, float], broken: tuple[str, ...] = ()) -> None:
        self.us, self.broken = us, broken
        self.released = 0
        self.flushes: list[int] = []

    def captured(self, arm: Arm, case: Any, flushes: int = 1) -> Callable[[], float]:
        """Whatever the case is."""
        del case
        self.flushes.append(flushes)
        if arm.name in self.broken:
            raise RuntimeError("no kernel\nhere")
        return lambda: self.us[arm.name]

    def release(self) -> None:
        """Counts."""
        self.released += 1


@pytest.fixture(scope="module")
def dispatcher() -> Dispatcher:
    return Dispatcher.open(**H200, kv_dtype="fp8")  # type: ignore[arg-type]


def without_case(point: Point) -> Point:
    return replace(point, case=lambda *_: None)  # type: ignore[arg-type]


def run(dispatcher: Dispatcher, name: str, told: Told, **more: Any) -> list[passes.Row]:
    end = time.monotonic() + 60
    return list(passes.rows(without_case(POINTS[name]), dispatcher, told, CPU, 5, end, **more))


def test_a_plan_s_arm_is_compared_with_the_best_of_all(dispatcher: Dispatcher) -> None:
    us = {"flashmla_kv": 110.0, "flashmla_kv_grouped": 108.0, "flashmla_sparse": 100.0}
    told = Told(us | {"triton": 105.0})
    found = run(dispatcher, "decode", told)

    assert len(found) == told.released == 5
    for row in found:
        assert row.regret == pytest.approx(told.us[row.chosen] / min(row.pass_us.values()) - 1)
        plan = dispatcher.plan(Batch.parse(row.batch))
        assert row.chosen == plan.decode


def test_the_whole_choice_of_a_prefill_counts(dispatcher: Dispatcher) -> None:
    us = {arm.name: 100.0 for arm in POINTS["prefill"].arms}
    found = run(dispatcher, "prefill", Told(us))

    for row in found:
        plan = dispatcher.plan(Batch.parse(row.batch))
        kernel = plan.mha_kernel if plan.prefill_path == "mha" else plan.sparse_prefill
        assert row.chosen == f"{plan.prefill_path}/{kernel}"


def test_sparse_only_leaves_dense_kernels_out(dispatcher: Dispatcher) -> None:
    found = run(
        dispatcher, "prefill", Told({arm.name: 9.0 for arm in POINTS["prefill"].arms}),
        sparse_only=True,
    )  # fmt: skip

    assert {arm.partition("/")[0] for row in found for arm in row.pass_us} == {"mla"}
    for row in found:
        plan = dispatcher.plan(Batch.parse(row.batch))
        assert row.chosen == f"mla/{plan.sparse_prefill}"


def test_arms_that_are_far_behind_are_not_run(dispatcher: Dispatcher) -> None:
    policy = dispatcher.policies["decode"]
    batch = Batch.decode([9000] * 64)
    chosen, arms = passes.contenders(POINTS["decode"], dispatcher, batch)
    costs = policy.survey(batch).latencies

    assert chosen in {arm.name for arm in arms}
    best = min(us for us in costs.values() if us is not None)
    assert all((costs[arm.name] or 0) <= 2 * best for arm in arms)
    assert "triton" not in {arm.name for arm in arms}


def test_an_arm_that_breaks_leaves_the_others(
    dispatcher: Dispatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    us = {arm.name: 100.0 for arm in POINTS["prefill"].arms}
    found = run(dispatcher, "prefill", Told(us, broken=("mha/sdpa",)))
    assert any(row.failed == {"mha/sdpa": "no kernel"} for row in found)

    run(dispatcher, "decode", Told(ALIKE, broken=("flashmla_kv",)))
    assert "not run: {'flashmla_kv': 'no kernel'}" in capsys.readouterr().err


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_all_arms_of_a_batch_have_the_same_work_between_their_layers(
    dispatcher: Dispatcher, share: float
) -> None:
    told = Told(ALIKE)
    row = run(dispatcher, "decode", told, share=share)[-1]

    last = told.flushes[-len(row.pass_us) :]
    known = dispatcher.policies["decode"].survey(Batch.parse(row.batch)).latencies
    best = min(us for arm in row.pass_us if (us := known[arm]) is not None)
    assert set(last) == {passes.flushes_for(share, best, told.flush_us)}


def test_memory_is_written_for_as_long_as_attention_leaves() -> None:
    # Of 1000 us attention takes 300; 18 flushes of 39 us take the rest.
    assert passes.flushes_for(0.3, 300.0, 39.0) == 18
    assert passes.flushes_for(1.0, 300.0, 39.0) == 1
    assert passes.flushes_for(0.5, 10.0, 39.0) == 1
    assert passes.flushes_for(0.3, 300.0, 0.0) == 1


def test_the_time_of_all_flushes_is_taken_off() -> None:
    asked: list[tuple[int, int]] = []

    class Graphs(passes.GraphPasses):
        def __init__(self) -> None:
            self.layers, self.flush_us = 3, 40.0

        def _graph(self, runs: Sequence[passes.Run], flushes: int = 1) -> Callable[[], float]:
            asked.append((len(runs), flushes))
            return lambda: 1000.0

    arm = replace(POINTS["decode"].arms[0], build=lambda _: lambda: torch.empty(0), first=None)

    assert Graphs().captured(arm, None, 2)() == 1000.0 - 3 * 2 * 40.0
    assert asked == [(3, 2)]


@pytest.mark.parametrize("share", ["0", "-1", "1.5"])
def test_a_share_is_a_part(
    share: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["passes", "--share", share])

    with pytest.raises(SystemExit):
        passes.main()
    assert f"--share {share}: give a number above 0, up to 1" in capsys.readouterr().err


def test_another_seed_draws_other_batches(dispatcher: Dispatcher) -> None:
    told = Told(ALIKE)
    one, same, other = (
        [row.batch for row in run(dispatcher, "decode", told, seed=seed)] for seed in (5, 5, 6)
    )

    assert one == same != other


def test_the_clock_ends_it(dispatcher: Dispatcher) -> None:
    told = Told(ALIKE)

    assert list(passes.rows(POINTS["decode"], dispatcher, told, CPU, 5, time.monotonic())) == []


def test_the_summary_names_the_worst() -> None:
    def row(batch: str, regret: float) -> passes.Row:
        times = {"a": 100.0 * (1 + regret), "b": 100.0}
        return passes.Row("decode", 16, "bf16", batch, "a", times, regret, {})

    text = passes.summary([row("decode:n1:9", 0.0), row("decode:n1:8", 0.12)])

    assert "2 batches, regret of a pass 6.00% on the mean, 12.0% at worst, 1 above 10 %" in text
    assert "decode:n1:8, a 112 us, b 100 us" in text
    assert passes.summary([]) == "no batch was run"


def test_torch_runs_whole_passes_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference arms, three layers, against a table of made-up times."""
    from nsa_tune.autotune.bench.devices import describe, key_of

    setting = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, describe(CPU))
    point, random, made = POINTS["decode"], Random(1), []
    for _ in range(30):
        batch = point.sample(setting, random)
        for arm, us in (("torch_kv", 50.0), ("torch_sparse", 60.0)):
            time_us = us + batch.q_tokens
            made.append(
                Measurement("decode", str(batch), arm, Status.OK, time_us, time_us, time_us, 9)
            )
    path, out = tmp_path / "table.tsv", tmp_path / "rows.jsonl"
    write_text(Table(key_of(setting, "cpu-clock/1"), setting.device, tuple(made), "", "2026"), path)
    options = [
        "--model",
        "tiny",
        "--heads",
        "4",
        "--device",
        "cpu",
        "--points",
        "decode",
        "--batches",
        "2",
        "--layers",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", ["passes", *options, "--db", str(path), "--out", str(out)])

    passes.main()

    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert set(row["pass_us"]) == {"torch_kv", "torch_sparse"}
        assert row["regret"] == row["pass_us"][row["chosen"]] / min(row["pass_us"].values()) - 1
    assert "decode, 4 heads, fp8_packed: 2 batches" in capsys.readouterr().out
