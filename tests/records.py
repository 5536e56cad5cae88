"""Keys, devices and measurements for tests."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from nsa_tune.backend.types.records import Device, Key, Measurement, Status, Table
from nsa_tune.db.store import Store

DEVICE = Device("NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20)
KEY = Key(
    gpu=DEVICE.name,
    driver="580.95.05",
    libraries=(("sgl-flash-mla", "1.0.0"), ("torch", "2.13.0")),
    model="deepseek-v3.2",
    heads=128,
    kv_layout="fp8_packed",
    protocol="cuda-graph-1",
)
MEASURED_AT = "2026-11-20T12:00:00.000000+00:00"


def ok(batch: str, arm: str = "mha/fa3", latency_us: float = 100.0) -> Measurement:
    """A successful measurement of `prefill`."""
    low_us, high_us = 0.5 * latency_us, 2 * latency_us
    return Measurement(
        "prefill", batch, arm, Status.OK, latency_us, low_us, high_us, samples=30, error=0.001
    )


def failed(batch: str, arm: str, reason: str) -> Measurement:
    """A failed measurement of `prefill`."""
    return Measurement("prefill", batch, arm, Status.FAILED, reason=reason)


def table(*measurements: Measurement, key: Key = KEY, measured_at: str = MEASURED_AT) -> Table:
    """A table of `key` on the H100."""
    return Table(key, DEVICE, measurements, "a test", measured_at)


def stored(path: Path, *every: Table) -> Path:
    """A database with a run for each table, which has measured it now."""
    with Store.open(path) as store:
        for one in every:
            run = store.begin_run(one.key, one.device, {"points": ["prefill"]})
            store.add(run, one.measurements)
            store.end_run(run, "done")
    return path


_rounded = st.floats(1e-3, 1e9).map(lambda value: float(f"{value:.4g}"))
_word = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1)
_hostile = st.text() | st.text("-\\\t\n\r#= u\x00\x1c\x85\u2028") | st.just("-")


@st.composite
def _measurements(draw: st.DrawFn) -> Measurement:
    status = draw(st.sampled_from(list(Status)))
    number = _rounded if status is Status.OK else st.none() | _rounded
    return Measurement(
        draw(_hostile), draw(_hostile), draw(_hostile), status,
        draw(number), draw(number), draw(number), draw(st.integers(0, 10**6)),
        draw(st.none() | _rounded | st.just(float("inf"))), draw(_hostile),
        pass_us=draw(st.none() | _rounded | st.just(0.0)),
    )  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Any table, with texts that a file format would rather not meet."""
    gpu, count = draw(_hostile), st.integers(0, 2**40)
    key = Key(
        gpu, draw(_hostile), tuple(draw(st.lists(st.tuples(_word, _hostile), max_size=3))),
        draw(_hostile), draw(count), draw(_hostile), draw(_hostile),
    )  # fmt: skip
    device = Device(gpu, draw(_hostile), draw(count), draw(count), draw(count), draw(count))
    rows = st.lists(_measurements(), max_size=8, unique_by=lambda m: (m.point, m.batch, m.arm))
    return Table(key, device, tuple(draw(rows)), "a test", draw(_hostile))
