"""advise: lines that a shell reads, weighted by a decision log, for known releases."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.reports.replay.test_rest import MODEL
from tests.reports.replay.test_whole_prefills import made_up
from tests.shell import GPU, Shell


def test_advise_prints_lines_that_a_shell_reads(shell: Shell, database: Path) -> None:
    answer = shell("advise", *GPU, "--heads", "128", "--db", str(database))

    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines
    assert all(line.startswith(("#", "export ", "NSA_TUNE_SGLANG_ARGS=")) for line in lines)
    done = subprocess.run(["sh", "-n"], input=answer.out, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_advise_weights_the_batches_of_a_decision_log(
    shell: Shell, database: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    command = ("advise", *GPU, "--db", str(database), "--json")
    unweighted = json.loads(shell(*command).out)
    assert unweighted["weights"] == "each measured batch counts the same"
    key = {name: unweighted[name] for name in ("gpu", "model", "heads", "kv_layout")}
    line = {
        "schema": "nsa-tune/decision/1", "time": 1.0, **key, "count": 3,
        "batch": "extend:1920+128", "own": {}, "taken": {},
    }  # fmt: skip
    other = {**line, "heads": 1, "batch": "decode:n1:64"}
    log.write_text(f"{json.dumps(other)}\n{json.dumps(line)}\n")

    weighted = json.loads(shell(*command, "--log", str(log)).out)

    assert weighted["schema"] == "nsa-tune/advise/2"
    assert weighted["weights"] == "weighted by the batches given"
    log.write_text(f"{json.dumps(other)}\n")
    foreign = shell(*command, "--log", str(log))
    assert foreign.code == 2
    assert f"it has {key['gpu']}, {key['model']}, 1, {key['kv_layout']}" in foreign.err
    log.write_text("")
    assert "it has no decisions" in shell(*command, "--log", str(log)).err


def test_advise_knows_which_releases_it_knows(shell: Shell, database: Path) -> None:
    answer = shell("advise", *GPU, "--db", str(database), "--engine-version", "0.4.0")

    assert answer.code == 2
    assert "0.4.0" in answer.err


def test_advise_ranks_configurations_on_a_trace(
    shell: Shell, database: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "made_up.jsonl"
    lines = [{"arrival_s": i, "input_tokens": 9000 * i + 300, "output_tokens": 3} for i in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = (
        "advise", *GPU, "--heads", "16", "--db", str(database), "--trace", str(trace),
        "--chunks", "4096,8192", "--attention", "tp,dp",
    )  # fmt: skip

    found = json.loads(shell(*command, "--flags", "--chunked-prefill-size 1024", "--json").out)

    assert found["schema"] == "nsa-tune/configurations/1"
    # For bf16 pools nothing is measured.
    assert {one["configuration"]["kv_dtype"] for one in found["ranked"]} == {"fp8"}
    assert len(found["skipped"]) == 2
    assert {one["configuration"]["dp"] for one in found["ranked"]} == {1, 8}
    seconds = [one["attention_s"] for one in found["ranked"]]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-3)
    # The plug-in takes the same kernel, and copies around it in less time.
    assert found["best"]["configuration"]["plugin"]
    static = [one["flags"] for one in found["ranked"] if not one["configuration"]["plugin"]]
    assert any("--dsa-prefill-backend flashmla_sparse" in flags for flags in static)
    assert "+--kv-cache-dtype fp8_e4m3" in found["differences"]
    answer = shell(*command)
    assert answer.code == 0
    done = subprocess.run(["sh", "-n"], input=answer.out, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "NSA_TUNE_SGLANG_ARGS=" in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chunks", "many"), "--chunks 'many'"),
        (("--chunks", "0"), "below 1"),
        (("--attention", "pp"), "--attention 'pp'"),
        (("--log", "some.jsonl"), "not both"),
    ],
)
def test_advise_refuses_what_it_cannot_compare(
    shell: Shell, database: Path, tmp_path: Path, arguments: tuple[str, str], words: str
) -> None:
    answer = shell("advise", *GPU, "--trace", str(tmp_path / "x"), *arguments)

    assert answer.code == 2
    assert words in answer.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "short.jsonl"
    lines = [{"arrival_s": i, "input_tokens": 700 + i, "output_tokens": 3} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_advise_ranks_by_measured_times_of_whole_passes(
    shell: Shell, database: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    rest, times = tmp_path / "rest.json", tmp_path / "times.json"
    rest.write_text(json.dumps({**MODEL, "kv_dtype": "fp8"}))
    times.write_text(made_up(gpu=GPU[1]).as_text())
    command = (
        "advise", *GPU, "--heads", "16", "--db", str(database), "--trace", str(trace), "--chunks",
        "8192", "--rest", str(rest), "--json",
    )  # fmt: skip

    def seconds(*arguments: str) -> dict[tuple[bool, bool], float]:
        answer = shell(*command, *arguments)
        assert answer.code == 0, answer.err
        return {
            (one["configuration"]["graphs"], one["configuration"]["plugin"]): one["passes_s"]
            for one in json.loads(answer.out)["ranked"]
            if one["configuration"]["prefill"] == [None, None]
        }

    priced, measured = seconds(), seconds("--pass-times", str(times))

    # 0.1 s and 0.05 ms a token for each of five graphs of 1024 tokens, 0.04048 s in a dense one.
    gain = measured[True, False] - measured[True, True]
    assert gain == pytest.approx(5 * (0.1512 - 0.04048), rel=1e-3)
    # As launches take 0.17 s, all prefills are slower without graphs, with the plug-in or not.
    assert measured[False, False] == measured[False, True] > measured[True, False]
    assert priced[True, False] - priced[True, True] < gain


@pytest.mark.parametrize(
    ("rest", "heads", "words"),
    [(False, 16, "give --rest besides"), (True, 64, "none of the files of --pass-times")],
)
def test_advise_refuses_pass_times_that_say_nothing(
    shell: Shell, database: Path, trace: Path, tmp_path: Path, rest: bool, heads: int, words: str
) -> None:
    times, file = tmp_path / "times.json", tmp_path / "rest.json"
    times.write_text(made_up(gpu=GPU[1], heads=heads).as_text())
    file.write_text(json.dumps(MODEL))
    command = (
        "advise", *GPU, "--heads", "16", "--db", str(database), "--trace", str(trace), "--chunks",
        "8192", "--pass-times", str(times), *(("--rest", str(file)) if rest else ()),
    )  # fmt: skip

    answer = shell(*command)

    assert answer.code == 2
    assert words in answer.err
