"""benchmarks/by_step.py: tables of times by step, from a table and measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import by_step
from nsa_tune import Dispatcher
from nsa_tune.backend.hardware import detect
from nsa_tune.db.text_table import read_text
from nsa_tune.reports.analysis.roofline import ceilings_of

H200 = "NVIDIA H200"


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[list[str]]:
    """The cells of what it prints."""
    monkeypatch.setattr(sys, "argv", ["by_step", *words])
    by_step.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_decode_has_a_row_for_each_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--gpu", H200, "--heads", "16,64", "--kv-dtype", "bf16")
    rows = shown(monkeypatch, capsys, "decode", *options)

    heading = ["heads", "rows", "fa3", "flashmla_sparse", "triton", "triton_split", "memory alone"]
    assert rows[0] == heading
    assert [row[:2] for row in rows if row[0] == "64"] == [["64", str(n)] for n in by_step.ROWS]
    last = rows[len(by_step.ROWS)]
    assert last[5] == "-", "triton_split is for 64 rows at most"
    found = Dispatcher.open(gpu=H200, model="deepseek-v3.2", heads=16, kv_dtype="bf16")
    assert found.table is not None
    ceilings = ceilings_of(found.table.measurements)
    assert ceilings is not None
    limit = 1e6 * 256 * 2048 * 1152 / ceilings.bytes_per_s
    assert float(last[6]) == pytest.approx(limit, rel=0.01)


def test_chunks_show_the_default_beside_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = shown(monkeypatch, capsys, "chunks", "--gpu", H200)

    attention = [row for row in rows if row[1] == "attention"]
    assert [row[0] for row in attention] == [
        "extend:0+8192", "extend:24576+8192", "extend:57344+8192",
    ]  # fmt: skip
    for row in attention:
        assert (row[2], row[4]) == ("mla/flashmla_kv", "mla/flashmla_sparse")
        assert float(row[3]) > float(row[5]) > float(row[6])
    selection = [row for row in rows if row[1] == "top-k"]
    assert len(selection) == len(attention)
    for row in selection:
        assert (row[2], row[4]) == ("sglang", "sampled")
        assert float(row[3]) > float(row[5]) > float(row[6])


def test_a_step_without_times_shows_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = shown(monkeypatch, capsys, "chunks", "--gpu", H200, "--heads", "16")

    untimed = next(row for row in rows if row[1] == "top-k")
    assert untimed[2:6] == ["sglang", "-", "-", "-"]


def test_batches_are_measured_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(by_step, "ROWS", (1, 3))
    monkeypatch.setattr(by_step, "CONTEXT", 200)
    monkeypatch.setattr(by_step, "CHUNK", 32)
    monkeypatch.setattr(by_step, "CONTEXTS", (160, 300))
    out = tmp_path / "HEADS.tsv"
    here = ("--gpu", detect.cpu_name(), "--model", "tiny", "--heads", "4")

    rows = shown(monkeypatch, capsys, "decode", *here, "--measure", "--out", str(out))
    kept = read_text(tmp_path / "4.tsv")
    assert {row.point for row in kept.measurements} == {"decode"}
    assert rows[0] == ["heads", "rows", "torch_kv", "torch_sparse", "memory alone"]
    for row, batch in zip(rows[1:], by_step.decode_batches(), strict=True):
        times = {m.arm: m.latency_us for m in kept.measurements if m.batch == str(batch)}
        assert float(row[2]) == pytest.approx(times["torch_kv"] or 0, rel=0.01)

    rows = shown(monkeypatch, capsys, "chunks", *here, "--measure")
    assert {row[1] for row in rows if row[0] != "batch"} == {
        "indexer schedule", "indexer logits", "top-k", "attention", "together",
    }  # fmt: skip
    assert all(row[5] != "-" for row in rows if row[1] in ("top-k", "attention", "indexer logits"))
