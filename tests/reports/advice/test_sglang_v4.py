"""Advice for V4's one switch, from the table that ships and from made-up times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Batch, Dispatcher, NoTunedData
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.types.records import Table
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import format_table, read_text
from nsa_tune.engines.sglang.releases import RELEASES
from nsa_tune.reports.advice.advice import EngineOption
from nsa_tune.reports.advice.sglang import advise
from nsa_tune.reports.advice.sglang_v4 import SPARSE_PREFILL, measured_by
from tests.reports.synthetic import H100

V4 = read_text(next(one for one in shipped() if one.stem == "h100-80gb-hbm3_deepseek-v4_h128_fp8"))
MANY = Batch.extend([0], [16384])
"""More new tokens than the engine asks the switch for."""


def opened(folder: Path, table: Table) -> Dispatcher:
    path = folder / "t.tsv"
    path.write_text(format_table(table))
    return Dispatcher.open(path, H100.name, model="deepseek-v4", heads=128, kv_dtype="fp8")


def paged_takes(share: float) -> Table:
    """The table, with the decode kernel taking this share of the sparse one's time."""
    sparse = {(r.point, r.batch): r.latency_us for r in V4.measurements if r.arm == "sparse_fwd"}
    rows = []
    for row in V4.measurements:
        if row.arm == "with_kvcache":
            time = share * (sparse[row.point, row.batch] or 0.0)
            row = replace(row, latency_us=time, low_us=time, high_us=time)
        rows.append(row)
    return replace(V4, measurements=tuple(rows))


def test_on_an_h100_the_switch_stays_on() -> None:
    advised = advise(Dispatcher.open(gpu=H100.name, model="deepseek-v4", heads=128, kv_dtype="fp8"))

    assert advised.advice == ()
    (one,) = advised.unadvised
    assert (one.name, one.why) == (SPARSE_PREFILL, "switching it off gains nothing")


def test_where_the_decode_kernel_is_faster_the_switch_goes_off(tmp_path: Path) -> None:
    table = opened(tmp_path, paged_takes(0.5))
    advised = advise(table, batches=[(b, 1.0) for b in measured_by(table) if b.q_tokens < 11673])

    (one,) = advised.advice
    assert one.settings == (EngineOption(SPARSE_PREFILL, "0", "1"),)
    assert one.verdict is Verdict.WIN
    assert one.gain == pytest.approx(2, rel=0.1)
    assert f"export {SPARSE_PREFILL}=0" in list(advised.shell())


def test_many_new_tokens_go_the_sparse_way_whatever_the_switch_says(tmp_path: Path) -> None:
    advised = advise(opened(tmp_path, paged_takes(0.5)), batches=[(MANY, 1.0)])

    assert advised.advice == ()


def test_a_table_that_lacks_a_ratio_gives_no_advice(tmp_path: Path) -> None:
    rows = tuple(row for row in V4.measurements if row.point != "v4_prefill_c128")

    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(opened(tmp_path, replace(V4, measurements=rows)))


def test_the_variable_is_one_of_each_release() -> None:
    """Which the contract tests look up in the wheels."""
    assert all(SPARSE_PREFILL in release.v4_environment for release in RELEASES)
