"""replay: each kind of trace priced, as text, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.reports.traffic.deployments import H200, SHORT_PROMPTS, write_trace
from tests.shell import GPU, Shell


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", SHORT_PROMPTS)


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `replay` for an H200 with the tables that ship."""
    shell = Shell(capsys)
    return lambda *arguments: shell("replay", *map(str, arguments), "--gpu", H200)


def document(replay: Any, *arguments: object) -> dict[str, Any]:
    answer = replay(*arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def test_the_first_line_says_what_the_plugin_and_the_best_flag_save(
    replay: Any, trace: Path
) -> None:
    answer = replay(trace, "--flags", "--tp 8 --kv-cache-dtype fp8_e4m3")

    assert answer.out.startswith("With the plug-in prefills take ")
    assert "with the best flag, --dsa-prefill-backend flashmla_sparse" in answer.out.splitlines()[0]


def test_a_misspelled_flag_is_told_in_every_answer(
    replay: Any, trace: Path, tmp_path: Path
) -> None:
    words = (trace, "--heads", "16", "--flags", "--dsa-prefil-backend fa3")
    page = tmp_path / "page.html"
    told = "--dsa-prefil-backend is left out, as no such flag is known here"

    assert replay(*words, "--html", page).out.splitlines()[1].startswith(told)
    assert told in page.read_text()
    assert document(replay, *words)["left_out"][0].startswith(told)


def test_the_trace_may_be_named_as_for_advise(replay: Any, trace: Path) -> None:
    assert replay("--trace", trace, "--heads", "16").out == replay(trace, "--heads", "16").out
    assert replay().code == replay(trace, "--trace", trace).code == 2
    assert "name one trace" in replay().err


def test_another_gpus_times_promise_nothing_of_the_plugin(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    words = ("--gpu", "H20", "--heads", "16", "--html", str(tmp_path / "page.html"), "--json")
    found = json.loads(Shell(capsys)("replay", str(trace), *words).out)

    assert all(row["setup"] != "plug-in" for row in found["setups"])
    assert not found["ways"]
    assert "by times of NVIDIA H100 80GB HBM3, which may be" in (tmp_path / "page.html").read_text()


def test_what_does_not_fit_serves_no_requests(replay: Any, trace: Path) -> None:
    found = document(replay, trace)

    assert found["headline"].startswith("This does not fit on 1 GPU: ")
    assert {row["TTFT mean s"] for row in found["setups"]} == {None}


def test_every_setup_prices_the_same_passes(replay: Any, trace: Path) -> None:
    found = document(replay, trace, "--heads", "16")

    assert found["schema"] == "nsa-tune/replay/3"
    assert found["requests"] == len(SHORT_PROMPTS)
    setups = {one["setup"]: one for one in found["setups"]}
    assert setups["plug-in"]["prefill s"] < setups["default"]["prefill s"]
    assert setups["plug-in"]["TTFT mean s"] < setups["default"]["TTFT mean s"]
    assert setups["--dsa-prefill-backend fa3"]["decode s"] is None
    assert sum(one["passes"] for one in found["ways"]) == found["passes"]["prefill"]
    by_way = sum(one["by default s"] for one in found["ways"])
    assert by_way == pytest.approx(setups["default"]["prefill s"])


def test_a_smaller_chunk_means_more_passes(replay: Any, trace: Path) -> None:
    usual, small = (
        document(replay, trace, "--flags", f"--tp 8{chunk}")
        for chunk in ("", " --chunked-prefill-size 512")
    )

    assert small["passes"]["prefill"] > usual["passes"]["prefill"]


def test_one_of_the_data_parallel_ranks_gets_its_share(replay: Any, trace: Path) -> None:
    found = document(replay, trace, "--flags", "--tp 4 --dp 4 --enable-dp-attention")

    assert found["requests"] == len(SHORT_PROMPTS) // 4


def test_a_decision_log_is_priced_as_it_ran(shell: Shell, database: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    line = {
        "schema": "nsa-tune/decision/1", "time": 1.0, "gpu": GPU[1], "model": "deepseek-v3.2",
        "heads": 128, "kv_layout": "fp8_packed", "count": 3, "batch": "extend:8192+2048",
        "own": {}, "taken": {},
    }  # fmt: skip
    log.write_text(json.dumps(line) + "\n")

    answer = shell("replay", str(log), *GPU, "--kv-dtype", "fp8", "--db", str(database), "--json")

    found = json.loads(answer.out)
    assert found["passes"] == {"prefill": 3, "decode": 0}
    assert not found["whole_passes"]


def test_the_page_begins_with_the_answer_and_escapes_names(
    replay: Any, trace: Path, tmp_path: Path
) -> None:
    odd, page = tmp_path / "<b>odd.jsonl", tmp_path / "page.html"
    odd.write_text(trace.read_text())

    assert replay(odd, "--heads", "16", "--html", page).code == 0

    text = page.read_text(encoding="utf-8")
    assert "<b>odd" not in text
    assert text.index("NVIDIA H200") < text.index("With the plug-in prefills take")
    assert text.index("With the plug-in prefills take") < text.index("Passes by setup")


def test_a_page_that_cannot_be_written_is_told(replay: Any, trace: Path, tmp_path: Path) -> None:
    answer = replay(trace, "--heads", "16", "--html", tmp_path / "no" / "page.html")

    assert answer.code == 1
    assert "cannot be written" in answer.err
