"""The order in which `benchmarks.arms` tries what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.arms import Row, Trial, in_turns, markdown, rows_of
from nsa_tune import Batch
from nsa_tune.autotune.bench.timing import timer_for
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device
from nsa_tune.reports.analysis.ceilings import Ceilings


def _rows(*names: str) -> list[list[Row]]:
    return [[Row(name, "arm", "tiny", 4, "bf16")] for name in names]


def test_each_point_has_its_first_batch_before_any_has_its_second() -> None:
    tried = [iter(_rows("prefill", "prefill", "prefill")), iter(_rows("decode"))]

    found = [(i, rows[0].point) for i, rows in in_turns(tried)]

    assert found == [(0, "prefill"), (1, "decode"), (0, "prefill"), (0, "prefill")]


def test_an_error_is_raised_before_any_other_point_goes_on() -> None:
    def breaks() -> Iterator[list[Row]]:
        yield _rows("prefill")[0]
        raise RuntimeError("the context is lost")

    later = iter(_rows("decode", "decode"))
    with pytest.raises(RuntimeError, match="lost"):
        list(in_turns([breaks(), later]))

    assert len(list(later)) == 1


def test_nothing_to_try() -> None:
    assert not list(in_turns([]))
    assert not list(in_turns([iter(())]))


def test_an_arm_has_its_rates_on_its_first_batch_beside_what_the_device_reaches() -> None:
    import torch

    profile, cpu = profile_of("tiny"), torch.device("cpu")
    setting = Setting(profile, 4, KVLayout.BF16, Device("CPU", "cpu"), overlap=0.8)
    batches = Batch.extend([300], [40]), Batch.extend([300], [7])
    ceilings = Ceilings(1e12, {"bf16": 1e15})
    trial = Trial(timer_for(cpu), sparse_only=True, batches=batches, ceilings=ceilings)

    *_, rows = rows_of(POINTS["prefill"], setting, trial)
    row = next(row for row in rows if row.arm == "mla/torch_sparse")

    assert (row.status, row.batch, row.overlap) == ("ok", str(batches[0]), 0.8)
    assert row.latency_us and row.gb_per_s and row.of_limit
    attended = 40 * profile.index_topk * 2 * 4 * (profile.latent + profile.rank)
    projected = 2 * 40 * 4 * profile.rank * (profile.nope + profile.v)
    assert row.tflop_per_s == pytest.approx((attended + projected) / row.latency_us / 1e6)
    assert row.of_limit == pytest.approx(row.gb_per_s / 1e3, rel=0.01)
    assert "mha/torch" not in markdown(rows)
