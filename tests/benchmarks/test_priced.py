"""The errors of prices: what is cached of a request, when clients send, and what an order is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import priced
from benchmarks.engine.traces import Request, Segment
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.reports.traffic.attention import DEFAULT

if TYPE_CHECKING:
    import pytest


def request(*segments: tuple[str, int], warm: bool = False) -> Request:
    return Request(tuple(Segment(*part) for part in segments), 4, warm=warm)


def test_what_was_computed_before_is_cached_in_whole_pages() -> None:
    requests = [
        request(("system", 100), warm=True),
        request(("system", 100), ("a", 50)),
        request(("system", 100), ("a", 50), ("b", 10)),
        request(("a", 50)),
        request(("system", 100), ("a", 50)),
    ]

    assert [each.cached_tokens for each in priced.cached_tokens(requests)] == [64, 128, 0, 128]


def test_a_client_sends_when_its_last_request_has_ended() -> None:
    engine = priced._deployment("NVIDIA H200", "deepseek-v3.2", 16, "bf16", None, "", None)
    requests = [Arrival(0.0, 4096, 8, 0)] * 6

    one, whole = priced.closed_loop(engine, requests, DEFAULT, 1, 300_000)
    three, _ = priced.closed_loop(engine, requests, DEFAULT, 3, 300_000)

    # Alone it waits for its own prefill and nothing else; beside two others for theirs too.
    assert 6 * one < whole.wall_s
    assert 1.5 * one < three < 3 * one


def test_less_time_passes_between_passes_since_0_5_23() -> None:
    of = "NVIDIA H200", "deepseek-v3.2", 16, "bf16", None, ""
    engines = [priced._deployment(*of, version) for version in ("0.5.17", "0.5.23", None)]

    assert [engine.passes.between_s for engine in engines] == [0.003, 0.0002, 0.0002]


def test_late_clients_let_the_first_request_run_alone() -> None:
    engine = priced._deployment("NVIDIA H200", "deepseek-v3.2", 16, "bf16", None, "", None)
    requests, sessions = [Arrival(0.0, 300, 4, 0)] * 8, ["a", "b", "c", "d"] * 2

    _, together = priced.closed_loop(engine, requests, DEFAULT, 4, 300_000, sessions)
    _, late = priced.closed_loop(engine, requests, DEFAULT, 4, 300_000, sessions, 0.012)

    # Of four answers that end together the next requests come one by one: two prefills, not one.
    assert late.wall_s > 1.3 * together.wall_s


def test_only_configurations_that_differ_are_ranked() -> None:
    pairs = [(1.0, 10.0), (2.0, 10.1), (3.0, 20.0), (2.5, 30.0)]

    assert priced.pairs_in_order(pairs) == (4, 5)


def test_errors_are_relative_to_what_was_measured() -> None:
    row = priced.errors("all", [(110.0, 100.0), (80.0, 100.0), (100.0, 100.0)])

    assert row == ("all", 3, "10.0%", "20.0%", "20.0%", "-3.3%")


def test_recorded_engines_and_traces_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configurations = [{"name": "default"}, {"name": "small", "chunk": 2048}]
    case = {"prefix": [0], "new": [4097], "configurations": {"default": {"gpu_ms": 133.0}}}
    trace: dict[str, Any] = {
        "trace": "long", "requests": 4, "concurrency": 2,
        "configurations": {
            name: {"ttft_ms": {"mean": ms}, "seconds": 4.0}
            for name, ms in (("default", 900.0), ("small", 1000.0))
        },
    }  # fmt: skip
    document = {
        "kv_dtype": "bf16", "configurations": configurations, "versions": {"sglang": "0.5.23"},
        "engine": {}, "gpu": {"name": "NVIDIA H200"},
        "tests": {"prefill": [case], "trace": [trace, trace]},
        "options": {
            "model": "deepseek-v3.2", "heads": 16, "layers": 30, "longest": 32768,
            "out_tokens": 16, "max_total": 300_000,
        },
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))

    assert priced.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| deepseek-v3.2 16 0.5.23 30 bf16 default | 1 |" in printed
    assert "| deepseek-v3.2 16 0.5.23 30, long | bf16 small | 1000 |" in printed
    assert "| deepseek-v3.2 16 0.5.23 30, prefills | bf16 default | 133 | " in printed
    assert "| 1 of 1 | 1.00 | the first loses 0.0% to the fastest |" in printed


def test_public_runs_are_read_once_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "model_path", "system", "backend", "tp_size", "isl", "osl", "batch_size",
        "silicon_ttft_ms", "silicon_tpot_ms",
    )  # fmt: skip
    run = ("zhipuai/GLM-5", "h200_sxm", "sglang", "8", "1024", "64", "4", "300", "18")
    other = ("zhipuai/GLM-5", "b200_sxm", *run[2:])
    path = tmp_path / "public.csv"
    path.write_text("\n".join(",".join(row) for row in (names, run, run, other)) + "\n")

    rows = list(priced._public(path))

    assert [row[:2] for row in rows] == [
        ("time of an output token", 1), ("time to first token", 1)
    ]  # fmt: skip
