"""Tables for the plug-in's tests: made up, with costs that a test can change."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from nsa_tune import Dispatcher
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import format_table
from tests.reports.synthetic import real_table

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
    path = folder / "table.tsv"
    path.write_text(_text(kv_dtype, mha_us, sparse_us))
    return path


@cache
def _text(kv_dtype: str, mha_us: float | None, sparse_us: float | None) -> str:
    flat = {"mha/fa3": mha_us, "mla/flashmla_sparse": sparse_us}
    table = real_table(kv_layout=str(layout_of(kv_dtype)), gpu=GPU)
    rows = tuple(_changed(row, flat.get(row.arm)) for row in table.measurements)
    device = replace(table.device, name=GPU)
    return format_table(Table(table.key, device, rows, "", table.measured_at))


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
