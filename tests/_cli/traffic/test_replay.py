"""replay: each kind of trace priced, as text, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsa_tune.db.store import Store
from nsa_tune.engines.sglang.pass_mode.times import remembered
from tests.reports.replay.test_rest import MODEL
from tests.reports.replay.test_whole_prefills import made_up
from tests.shell import GPU, Shell

HEADS = ("--heads", "16")
H100 = made_up(gpu=GPU[1])
WAYS = {"engine", "plug-in", "table", "best arm"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "made_up.jsonl"
    lines = [
        {"arrival_s": i / 2, "input_tokens": 500 + 700 * i, "output_tokens": 5} for i in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replayed(shell: Shell, *arguments: str) -> dict[str, Any]:
    answer = shell("replay", *GPU, *arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def test_replay_prices_the_prefills_of_a_trace(shell: Shell, database: Path, trace: Path) -> None:
    found = replayed(shell, str(trace), "--db", str(database), "--chunk", "2048")

    assert found["schema"] == "nsa-tune/replay/1"
    assert found["traffic"]["requests"] == 8
    assert found["traffic"]["prompt_tokens"] == 8 * 500 + 700 * 28
    kind = found["kinds"]["prefill"]
    assert kind["new_tokens"] == found["traffic"]["prompt_tokens"]
    assert set(kind["ways"]) == WAYS
    seconds = {way: one["seconds"] for way, one in kind["ways"].items()}
    assert seconds["best arm"] <= seconds["table"] < seconds["engine"]
    assert kind["static"]["flags"] == ["--dsa-prefill-backend flashmla_sparse"]
    assert found["lost"][0]["lost_us"] > 0
    assert found["served"] == []
    assert found["kinds"]["decode"]["unpriced"]["decode"] == found["kinds"]["decode"]["passes"]


def test_replay_tells_what_it_does_not_hold(shell: Shell, database: Path, trace: Path) -> None:
    answer = shell("replay", str(trace), *GPU, "--db", str(database))

    assert answer.code == 0
    assert "Where the engine loses most" in answer.out
    assert "times are of attention alone" in answer.err
    assert "decode was not measured for" in answer.err


def test_with_the_rest_of_a_pass_requests_are_served(
    shell: Shell, database: Path, trace: Path, tmp_path: Path
) -> None:
    rest = tmp_path / "rest.json"
    rest.write_text(json.dumps({**MODEL, "error": {"median": 0.02, "p90": 0.05, "passes": 100}}))
    common = (str(trace), "--db", str(database), "--rest", str(rest))

    found = replayed(shell, *common)

    assert [one["way"] for one in found["served"]] == ["engine", "plug-in", "table"]
    engine, _, table = found["served"]
    assert 0 < table["ttft_s"]["p50"] < engine["ttft_s"]["p50"]
    assert table["busy_s"] < engine["busy_s"] <= engine["wall_s"]
    answer = shell("replay", *GPU, *common)
    assert "2.0% off (median), 5.0% (p90)" in answer.err
    assert "How the requests are served" in answer.out


def test_a_faster_trace_and_more_ranks_change_the_batches(
    shell: Shell, database: Path, trace: Path
) -> None:
    common = (str(trace), "--db", str(database))

    one_of_two = replayed(shell, *common, "--dp", "2")
    first = replayed(shell, *common, "--requests", "3", "--speed", "1000")

    assert one_of_two["traffic"]["requests"] == 4
    assert one_of_two["traffic"]["scheduler"]["chunk"] == 4096
    assert one_of_two["graph_tokens"] == 4096
    assert first["traffic"]["requests"] == 3
    # The first runs alone; the others come meanwhile, and share a chunk.
    assert first["kinds"]["prefill"]["passes"] == 2


def test_replay_prices_a_decision_log(shell: Shell, database: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    line = {
        "schema": "nsa-tune/decision/1", "time": 1.0, "gpu": GPU[1], "model": "deepseek-v3.2",
        "heads": 128, "kv_layout": "fp8_packed", "count": 3, "batch": "extend:8192+2048",
        "own": {}, "taken": {},
    }  # fmt: skip
    log.write_text(json.dumps(line) + "\n")

    found = replayed(shell, str(log), "--db", str(database))

    assert found["traffic"]["form"] == "decisions"
    assert found["kinds"]["prefill"]["passes"] == 3
    assert "decode" not in found["kinds"]


def test_the_page_has_charts_and_escapes_the_traces_name(
    shell: Shell, database: Path, trace: Path, tmp_path: Path
) -> None:
    odd, page = tmp_path / "<b>odd.jsonl", tmp_path / "page.html"
    odd.write_text(trace.read_text())

    answer = shell("replay", str(odd), *GPU, "--db", str(database), "--html", str(page))

    assert answer.code == 0
    text = page.read_text()
    assert "&lt;b&gt;odd.jsonl" in text
    assert "<b>odd" not in text
    assert "Where the engine loses most" in text


def test_without_times_there_is_nothing_to_price(shell: Shell, trace: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    Store.open(empty).close()

    answer = shell("replay", str(trace), *GPU, "--db", str(empty))

    assert answer.code == 3
    assert "no times to price with" in answer.err


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_whole_passes_are_priced_by_a_file_of_pass_times(
    shell: Shell, database: Path, trace: Path, tmp_path: Path, kept: None
) -> None:
    file = tmp_path / "times.json"
    file.write_text(H100.as_text())
    page = tmp_path / "page.html"
    common = (str(trace), *GPU, *HEADS, "--db", str(database), "--pass-times", str(file))

    answer = shell("replay", *common, "--html", str(page))

    assert answer.code == 0, answer.err
    assert "Whole prefill passes" in answer.out
    assert "decode_graph" in answer.out
    assert "assume 30 ms for a decode pass" in answer.err
    assert "Whole prefill passes by the way that they run" in page.read_text()
    whole = (found := json.loads(shell("replay", *common, "--json").out))["whole"]
    engine, plugin, *_ = whole["setups"]
    assert str(file) in whole["source"]
    assert plugin["seconds"] < engine["seconds"] == engine["engine_seconds"]
    served = {one["way"]: one["ttft_s"]["mean"] for one in found["served"]}
    assert served["plug-in"] < served["engine"]
    assert "--disable-prefill-cuda-graph" in served  # the best flag: two short prompts of three


def test_the_newest_kept_pass_times_that_fit_are_taken(
    shell: Shell, database: Path, trace: Path, kept: None
) -> None:
    assert remembered.save(H100)
    assert remembered.save(made_up(gpu=GPU[1], heads=64))
    command = (str(trace), *HEADS, "--db", str(database))

    found = replayed(shell, *command)

    assert found["whole"] is not None
    assert replayed(shell, *command, "--layers", "3")["whole"] is None
    assert replayed(shell, *command, "--graph-tokens", "0")["whole"] is None


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (made_up(gpu=GPU[1], heads=128).as_text(), (), "heads is 128 and not 16"),
        (H100.as_text(), ("--next-n", "4"), "draft_tokens is None and not 4"),
        (made_up(gpu=GPU[1], dp_attention=8).as_text(), (), "dp_attention is 8 and not 1"),
        (H100.as_text(), ("--dp", "2"), "ranks wait for each other"),
        (H100.as_text(), ("--graph-tokens", "0"), "without prefill graphs"),
        ("{}", (), "has no times of passes"),
        (None, (), "cannot be read"),
    ],
)
def test_pass_times_of_another_engine_are_refused(
    shell: Shell,
    database: Path,
    trace: Path,
    tmp_path: Path,
    kept: None,
    text: str | None,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    file = tmp_path / "times.json"
    if text is not None:
        file.write_text(text)

    command = ("replay", str(trace), *GPU, *HEADS, "--db", str(database), *arguments)
    answer = shell(*command, "--pass-times", str(file))

    assert answer.code == 2
    assert words in answer.err
