"""Tables made by a small cost model, for tests of reports: no measurement is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Arm, FeatureFunctions, Guard, Point, Question, Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Device, Key, Measurement, Status, Table

H100 = Device("NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20)
LIBRARIES = (
    ("flashinfer-python", "0.7.2"), ("sgl-deep-gemm", "0.2.5"), ("sgl-flash-mla", "1.0.0"),
    ("torch", "2.14.1"),
)  # fmt: skip

Cost = Callable[[Batch], float]


def measured(point: str, batch: Batch, arm: str, latency_us: float, spread: float) -> Measurement:
    """A successful measurement with an interval of `spread` either way."""
    low, high = latency_us / (1 + spread), latency_us * (1 + spread)
    return Measurement(point, str(batch), arm, Status.OK, latency_us, low, high, 30, 1e-3)


def key_of(model: str = "deepseek-v3.2", **changes: Any) -> Key:
    """A key of an H100, with `changes`."""
    fields: dict[str, Any] = {
        "gpu": H100.name, "driver": "580.65.06", "libraries": LIBRARIES, "model": model,
        "heads": PROFILES[model].heads, "kv_layout": "fp8_packed", "protocol": "cuda-graph/1",
    }  # fmt: skip
    return Key(**{**fields, **changes})


# --- a made-up point, whose crossovers are known exactly


def _no_case(*_: object) -> Any:
    raise AssertionError("nothing is measured here")


_FEATURES = FeatureFunctions(
    ("q_tokens", "q_tokens_squared"),
    lambda batch: (batch.q_tokens, batch.q_tokens**2),
    lambda batch: (log2(batch.q_tokens),),
)


def _limit(most: int) -> Guard:
    def limit(batch: Batch) -> str | None:
        return f"steep ends at {most} tokens" if batch.q_tokens > most else None

    return Guard("most", "formula", "made up", lambda setting: limit)


def toy_point(limit: int | None = None) -> Point:
    """Arms steep/a and flat/a over new tokens; steep may end at `limit` tokens."""
    limits = () if limit is None else (_limit(limit),)
    layouts = frozenset(KVLayout)
    news = [2**k for k in range(13)]
    return Point(
        name="toy",
        modes=frozenset({Mode.EXTEND}),
        arms=(
            Arm("steep/a", _no_case, layouts, guards=limits),
            Arm("flat/a", _no_case, layouts),
        ),
        questions=(Question("toy_path", {"steep": ("steep/a",), "flat": ("flat/a",)}),),
        features=lambda setting: _FEATURES,
        grid=lambda setting: [Batch.extend([0], [new]) for new in news],
        case=_no_case,
        sample=_no_case,
    )  # fmt: skip


STEEP: Cost = lambda batch: 10 + batch.q_tokens  # noqa: E731
FLAT: Cost = lambda batch: 100 + 0.1 * batch.q_tokens  # noqa: E731


def toy_table(
    point: Point, *, steep: Cost = STEEP, flat: Cost = FLAT, spread: float = 0.002
) -> Table:
    """`point` measured on its grid; with the default costs the two meet at 100 tokens."""
    costs = {"steep/a": steep, "flat/a": flat}
    key = key_of()
    setting = Setting(PROFILES[key.model], key.heads, KVLayout(key.kv_layout), H100)
    rows = [
        measured(point.name, batch, arm.name, costs[arm.name](batch), spread)
        for batch in point.grid(setting)
        for arm in point.arms
        if arm.allowed(batch, setting) is None
    ]
    return Table(key, H100, tuple(rows), "made up", "2026-11-21T09:00:00Z")


# --- the real points, by costs of the right shape

_REAL: dict[str, Cost] = {
    "mha/fa3": lambda b: 28 + 0.105 * b.kv_tokens + 0.06 * b.prefix_tokens + 6e-5 * b.pairs,
    "mla/flashmla_sparse": lambda b: 42 + 0.07 * b.q_tokens + 0.006 * b.prefix_tokens
    + 3.2e-4 * min(b.pairs, 2048 * b.q_tokens),
    "mla/flashmla_kv": lambda b: 36 + 0.09 * b.q_tokens + 4.0e-4 * min(b.pairs, 2048 * b.q_tokens),
    "native/deep_gemm": lambda b: 9 + 6.5e-5 * b.kv_tokens * b.next_n,
    "pairs/deep_gemm": lambda b: 9.5 + 7.5e-5 * b.kv_tokens * b.next_n,
    "flatten/deep_gemm": lambda b: 8 + 0.05 * b.q_tokens + 1.3e-4 * b.kv_tokens * b.next_n,
}  # fmt: skip


def real_table(
    *,
    points: tuple[str, ...] = ("prefill", "indexer_layout"),
    spread: float = 0.01,
    ceilings: bool = False,
    scale: Callable[[str, Batch], float] = lambda arm, batch: 1.0,
    **changes: Any,
) -> Table:
    """The real points' grids on an H100; the arm mla/flashmla_kv fails past 8192 tokens.

    `scale` makes an arm slower on a batch; `ceilings` adds 3 TB/s, 600 and 1200 TFLOP/s.
    """
    key = key_of(**changes)
    libraries = dict(key.libraries)
    setting = Setting(PROFILES[key.model], key.heads, KVLayout(key.kv_layout), H100, libraries)
    rows = list(CEILINGS) if ceilings else []
    for name in points:
        point = POINTS[name]
        arms = [arm for arm in point.candidates(setting) if arm.name in _REAL]
        for batch in point.grid(setting):
            allowed = [arm.name for arm in arms if arm.allowed(batch, setting) is None]
            if len(allowed) > 1:
                rows += [_real_row(name, batch, arm, spread, scale(arm, batch)) for arm in allowed]
    return Table(key, H100, tuple(rows), "made up", "2026-11-21T09:00:00Z")


def _ceiling(batch: str, arm: str, latency_us: float) -> Measurement:
    return Measurement("roofline", batch, arm, Status.OK, latency_us, latency_us, latency_us, 9)


CEILINGS = (
    _ceiling("copy:1500000000", "copy", 1000.0),
    _ceiling("copy:1500000", "copy", 10.0),
    _ceiling("matmul:10000x10000x3000", "matmul_bf16", 1000.0),
    _ceiling("matmul:10000x10000x3000", "matmul_fp8", 500.0),
)
"""3 TB/s (a smaller copy is slower), 600 and 1200 TFLOP/s."""


def _real_row(point: str, batch: Batch, arm: str, spread: float, scale: float) -> Measurement:
    if arm == "mla/flashmla_kv" and batch.q_tokens > 8192:
        reason = "CUDA error: an illegal memory access was encountered"
        return Measurement(point, str(batch), arm, Status.FAILED, reason=reason)
    # A repeatable wobble, so that no surface is perfect.
    wobble = 1 + 0.01 * ((hash_of(f"{batch}{arm}") % 201) / 100 - 1)
    return measured(point, batch, arm, _REAL[arm](batch) * wobble * scale, spread)


def hash_of(text: str) -> int:
    """A number that is the same in each process."""
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 1_000_003
    return value


def hostile_table(words: str) -> Table:
    """A table with `words` wherever a stranger may write some."""
    table = real_table(points=("indexer_layout",))
    bad = Measurement(
        "indexer_layout", "decode:n1:64", "native/deep_gemm", Status.FAILED, reason=words
    )
    key = replace(table.key, gpu=words, driver=words, libraries=((words, words),))
    return replace(table, key=key, measurements=(*table.measurements, bad), source=words)
