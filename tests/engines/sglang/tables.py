"""Tables for the plug-in's tests: made up, with costs that a test can change."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout, layout_of
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import format_table
from tests.reports.synthetic import H100, key_of, measured, real_table

GPU = "NVIDIA Test GPU"
"""A Hopper that no table comes with the package for."""


def table_file(
    folder: Path,
    kv_dtype: str = "fp8",
    *,
    mha_us: float | None = None,
    sparse_us: float | None = None,
) -> Path:
    """A text table in `folder`, where an arm may cost the same for each batch."""
    flat = {"mha/fa3": mha_us, "mla/flashmla_sparse": sparse_us}
    table = real_table(kv_layout=str(layout_of(kv_dtype)), gpu=GPU)
    rows = tuple(_changed(row, flat.get(row.arm)) for row in table.measurements)
    device = replace(table.device, name=GPU)
    path = folder / "table.tsv"
    path.write_text(format_table(Table(table.key, device, rows, "", table.measured_at)))
    return path


def _changed(row: Measurement, latency_us: float | None) -> Measurement:
    if latency_us is None or row.status is not Status.OK:
        return row
    return replace(row, latency_us=latency_us, low_us=latency_us, high_us=latency_us)


@cache
def dispatcher(
    kv_dtype: str, *, mha_us: float | None = None, sparse_us: float | None = None
) -> Dispatcher:
    """The dispatcher over such a table."""
    with tempfile.TemporaryDirectory() as folder:
        path = table_file(Path(folder), kv_dtype, mha_us=mha_us, sparse_us=sparse_us)
        return Dispatcher.open(
            path, GPU, model="deepseek-v3.2", heads=128, kv_dtype=kv_dtype, strict=True
        )


_V4_READ_BACK_US = {4: 2.5e-4, 128: 1e-4}
"""What sparse_fwd takes for each token of the context, in a layer of either ratio."""


def v4_table_file(
    folder: Path, *, paged_us: float | None = None, points: tuple[int, ...] = (4, 128)
) -> Path:
    """A text table of V4's prefill, in which the paged kernel may cost the same for each batch.

    It is dearer for each new token and spares reading back, so that the ratios' answers differ.
    """
    device = replace(H100, name=GPU)
    key = key_of("deepseek-v4", gpu=GPU, kv_layout="v4_paged")
    profile = PROFILES["deepseek-v4"]
    setting = Setting(profile, key.heads, KVLayout.V4_PAGED, device, dict(key.libraries))
    rows = [
        measured(f"v4_prefill_c{ratio}", batch, arm, latency_us, 0.01)
        for ratio in points
        for batch in POINTS[f"v4_prefill_c{ratio}"].grid(setting)
        for arm, latency_us in _v4_costs(ratio, batch, paged_us).items()
    ]
    path = folder / "v4.tsv"
    path.write_text(format_table(Table(key, device, tuple(rows), "", "2026-11-21T09:00:00Z")))
    return path


def _v4_costs(ratio: int, batch: Batch, paged_us: float | None) -> dict[str, float]:
    sparse_us = 15 + 0.35 * batch.q_tokens + _V4_READ_BACK_US[ratio] * batch.kv_tokens
    paged = 26 + 0.55 * batch.q_tokens if paged_us is None else paged_us
    return {"sparse_fwd": sparse_us, "with_kvcache": paged}


@cache
def v4_dispatcher(*, paged_us: float | None = None) -> Dispatcher:
    """The dispatcher over such a table."""
    with tempfile.TemporaryDirectory() as folder:
        path = v4_table_file(Path(folder), paged_us=paged_us)
        return Dispatcher.open(
            path, GPU, model="deepseek-v4", heads=128, kv_dtype="fp8", strict=True
        )
