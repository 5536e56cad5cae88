"""The comparison says who is faster, and by how much, as the results have it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.engine.compare import main, state_table
from benchmarks.engine.comparison import KINDS, Engine, contest_of, read
from benchmarks.engine.paired import ratio_of, spread_of, verdict_of
from nsa_tune.backend.baselines.sglang_0_5_23 import V4_GRAPHS
from tests.benchmarks.engine.results import result

_PREFILL = KINDS[0]
_BF16 = result(
    "bf16",
    {
        "0+2048 x4": {"default": 377, "plugin": 284, "eager": 285},
        "0+2048 x1": {"default": 115, "plugin": 115, "eager": 283},
        "8192+128 x1": {"default": 105, "plugin": 108, "eager": 278},
    },
    decode={"32": {"default": 27.8, "plugin": 27.8}},
    trace={"chat": {"default": 23.1, "plugin": 20.0, "eager": 30.0}},
)
_FP8 = result(
    "fp8", {"0+2048 x4": {"default": 590, "plugin": 240, "flashmla_sparse": 381}}, kv_dtype="fp8"
)


def _engine(document: dict[str, Any]) -> Engine:
    return Engine(document["label"], json.loads(json.dumps(document)))


def test_each_batch_has_its_winner() -> None:
    contest = contest_of(_engine(_BF16), _PREFILL)

    verdicts = {
        line.name: (line.verdict("default"), line.verdict("static")) for line in contest.lines
    }
    assert verdicts == {
        "0+2048 x4": ("win", "tie"),
        "0+2048": ("tie", "tie"),
        "8192+128": ("loss", "loss"),
    }
    assert contest.count("default") == {"win": 1, "tie": 1, "loss": 1, "unsure": 0}
    assert [line.static.configuration for line in contest.lines] == ["eager", "default", "default"]
    gain = (284 / 377 * 115 / 115 * 108 / 105) ** (1 / 3) - 1
    assert contest.gain("default") == pytest.approx(gain, abs=1e-4)


def test_of_several_with_the_plug_in_the_first_by_name_counts() -> None:
    """Rows hold their configurations in the order in which they ran."""
    times = {"plugin_without": 2.0, "default": 3.0, "plugin": 1.0}
    (line,) = contest_of(_engine(result("bf16", {"0+9 x1": times})), _PREFILL).lines
    assert (line.plugin.configuration, line.static.configuration) == ("plugin", "default")


def test_differences_of_outputs_are_shown_and_what_is_not_finite_is_said() -> None:
    difference = {"rows": 3, "not_finite": 1, "median": 0.004, "largest": 0.0213}
    one = {
        "hidden_states": difference, "logits": None, "same_best_token": 1, "compared": 1,
        "kl_nats": {"median": 0.001, "largest": 0.25},
    }  # fmt: skip
    # What other prefixes make is not said to have run in any way.
    ways = {"another last page": one, "rows": one | {"ran": ["decode_graph"]}}
    row = {"case": "64+3 x1", "configurations": ways}
    shown = list(state_table("bf16", [row, {"case": "late", "configurations": {}}]))

    figures = ("0.004", "0.021 and 1 not finite", "-", "-", "0.25", "1 of 1")
    assert [table.rows for table in shown] == [(
        ("64+3 x1", "another last page", "", *figures),
        ("64+3 x1", "rows", "decode_graph", *figures),
    )]  # fmt: skip
    assert not list(state_table("bf16", []))


def test_an_engine_without_the_plugin_stands_beside_those_where_it_is_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"without": 30.0, "paused": 33.0}
    engines = [
        result(name, {}, decode={"32": {"default": ms}}, started_as="default")
        for name, ms in times.items()
    ]
    engines[1]["configurations"] = [{"name": "plugin", "plugin": True}]
    took = {"the plug-in in all": 7.5, "warming up": 1.5, "recording": 4.0}
    engines[1]["start"] = {"by_rank": [took], "graphs_mib": 123, "used_mib": [4567]}
    for document, ms in zip(engines, times.values(), strict=True):
        found = document["tests"]["decode"][0]["configurations"]["default"]
        found["sweeps"]["gpu_ms"] = {str(i): ms + 0.1 * (i % 3) for i in range(12)}
        (tmp_path / document["label"]).write_text(json.dumps(document))

    assert main([str(tmp_path / name) for name in times]) == 0
    said = capsys.readouterr().out
    assert "32 sequences of 4096   30.10     33.10" in said
    assert re.search(r"paused +7\.5 +5\.5 +4\.0 +123 +4567", said)
    assert f"{33.0 / 30.2:.3f} to {33.2 / 30.0:.3f}" in said


def test_the_tables_hold_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for document in (_BF16, _FP8):
        paths.append(tmp_path / f"{document['label']}.json")
        paths[-1].write_text(json.dumps(document))
    markdown = tmp_path / "table.md"

    code = main([f"A={paths[0]}", str(paths[1]), "--markdown", str(markdown)])
    assert code == 1, "a batch is lost"
    assert "0+2048 x4" in capsys.readouterr().out
    text = markdown.read_text()
    assert re.search(r"\| 0\+2048 x4 \| 377.\d \| 285.\d \| eager \| 284.\d \| 0.753", text)
    assert main([str(paths[1])]) == 0


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"schema": "nsa-tune/report/1"}')
    with pytest.raises(ValueError, match="nsa-tune/engine/1"):
        read(path)


_TIMES = st.lists(st.floats(1, 1e3), min_size=6, max_size=12)


@example(times=[287, 160.4446081456802, 618.3082587781181, 2.77, 773.82, 326.8], factor=0.203125)
@given(times=_TIMES, factor=st.floats(0.2, 5))
def test_a_constant_factor_is_found(times: list[float], factor: float) -> None:
    default = dict(enumerate(times))
    ratio = ratio_of({i: t * factor for i, t in default.items()}, default)
    assert ratio is not None
    # A factor between two numbers of five digits may be rounded to either.
    assert ratio["interval"] == pytest.approx([ratio["median"]] * 2, abs=1.1e-5)
    assert ratio["median"] == pytest.approx(factor, rel=1e-4)
    expected = "win" if factor < 0.9899 else "loss" if factor > 1.0101 else None
    assert expected is None or verdict_of(ratio) == expected


@given(values=_TIMES, others=_TIMES)
def test_the_interval_of_a_ratio_holds_its_median(values: list[float], others: list[float]) -> None:
    found = ratio_of(dict(enumerate(values)), dict(enumerate(others)))
    assert found is not None
    low, high = found["interval"]
    assert low <= found["median"] <= high


def test_too_few_pairs_have_no_interval_and_no_verdict() -> None:
    ratio = ratio_of({1: 1.0, 2: 1.0, 9: 5.0}, {1: 2.0, 2: 2.0})
    assert ratio == {"median": 0.5, "interval": None, "pairs": 2}
    assert verdict_of(ratio) == "unsure"
    assert ratio_of({1: 1.0}, {}) is None and verdict_of(None) == "unsure"


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_is_ordered(values: list[float]) -> None:
    found = spread_of(values)
    assert min(values) - 0.001 <= found["median"] <= found["p90"] + 0.001
    assert found["p90"] <= max(values) + 0.001


def test_what_v4_is_told_of_sglangs_graphs_is_what_they_took() -> None:
    (path,) = (Path(__file__).parents[3] / "benchmarks/engine/results/v4").glob("*_graphs.json")
    document = json.loads(path.read_text())
    rows = [row["configurations"] for row in document["tests"]["prefill"]]
    ratios = [row["graph"]["gpu_ms"] / row["default"]["gpu_ms"] for row in rows]
    assert f"took {1 - geometric_mean(ratios):.0%} less" in V4_GRAPHS
    assert f"up to {max(ratios) - 1:.0%} more; {document['options']['layers']} layers" in V4_GRAPHS
