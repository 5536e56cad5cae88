"""A made-up decision point with made-up times: whatever is generic over points works on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from math import log2
from random import Random
from typing import TYPE_CHECKING, Any

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import (
    Arm,
    Case,
    FeatureFunctions,
    Guard,
    Limit,
    Point,
    Question,
    Setting,
)
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Key, Measurement, Status, Table

if TYPE_CHECKING:
    import torch

Times = Mapping[str, Callable[[Batch], float]]
"""Arm to its true microseconds."""

DEVICE = Device("Test GPU", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20)
SETTING = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, DEVICE)
KEY = Key("Test GPU", "1.0", (("torch", "2.0"),), "deepseek-v3.2", 128, "fp8_packed", "fake 1")


def _dense(setting: Setting) -> Limit:
    topk = setting.profile.index_topk
    return lambda batch: "too long for dense" if batch.max_kv > topk else None


def _not_captured(setting: Setting) -> Limit:
    del setting
    return lambda batch: "not under capture" if batch.captured else None


def _few_rows(setting: Setting) -> Limit:
    del setting
    return lambda batch: "more than 4096 rows" if batch.q_tokens > 4096 else None


def _nothing(case: Any) -> Callable[[], torch.Tensor]:
    raise NotImplementedError("a made-up arm cannot be built")


def _no_case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    raise NotImplementedError("a made-up point has no tensors")


_ANY = frozenset(KVLayout)
_PACKED = frozenset({KVLayout.FP8_PACKED})
_DENSE = (
    Guard("dense", "semantic", "made up", _dense),
    Guard("captured", "semantic", "made up", _not_captured),
)

BATCHES = [
    Batch.extend([prefix], [new])
    for prefix in (0, 256, 512, 1024, 2048, 8192)
    for new in (1, 8, 64, 256, 1024, 4096)
]

FEATURES = FeatureFunctions(
    names=("q_tokens", "kv_tokens"),
    features=lambda batch: (batch.q_tokens, batch.kv_tokens),
    coordinates=lambda batch: (log2(batch.q_tokens), log2(batch.kv_tokens)),
    regime=lambda batch: 1 if batch.prefix_tokens else 0,
)

FAKE = Point(
    name="fake",
    modes=frozenset({Mode.EXTEND}),
    arms=(
        Arm("mha/dense", _nothing, _ANY, archs=frozenset({"sm90"}), guards=_DENSE),
        Arm("mla/wide", _nothing, _ANY),
        Arm("mla/packed", _nothing, _PACKED, guards=(Guard("rows", "formula", "", _few_rows),)),
        Arm("mla/plain", _nothing, _ANY, reference=True),
    ),
    questions=(
        Question("prefill_path", {"mha": ("mha/dense",), "mla": ("mla/wide", "mla/packed")}),
        Question("sparse_prefill", {"wide": ("mla/wide",), "packed": ("mla/packed",)}),
    ),
    features=lambda setting: FEATURES,
    grid=lambda setting: BATCHES,
    case=_no_case,
    sample=lambda setting, random: _random_batch(random),
)


def _random_batch(random: Random) -> Batch:
    return Batch.extend([random.randint(0, 8192)], [random.randint(1, 4096)])


def linear(q: float, kv: float, constant: float) -> Callable[[Batch], float]:
    """A time that is linear in the made-up point's features."""
    return lambda batch: q * batch.q_tokens + kv * batch.kv_tokens + constant


def measured(
    times: Times, batches: Iterable[Batch] = BATCHES, setting: Setting = SETTING
) -> list[Measurement]:
    """A measurement of each allowed arm on each batch, 0.2 % wide."""
    rows = []
    for batch in batches:
        for arm in FAKE.arms:
            if arm.name in times and arm.allowed(batch, setting) is None:
                time = times[arm.name](batch)
                rows.append(
                    Measurement(
                        FAKE.name,
                        str(batch),
                        arm.name,
                        Status.OK,
                        time,
                        time * 0.999,
                        time * 1.001,
                        samples=10,
                        error=0.0,
                    )
                )
    return rows


def policy_of(times: Times, setting: Setting = SETTING) -> Policy:
    """The policy of a sweep with these true times."""
    return Policy.fit(FAKE, setting, measured(times, setting=setting))


PASS_US = 300.0


def sharing_rows() -> list[Measurement]:
    """`mla/packed` is quicker than `mla/wide` in each layer, and takes `PASS_US` once a pass."""
    rows = measured({"mla/wide": linear(0.01, 0, 50), "mla/packed": linear(0.01, 0, 40)})
    return [
        dataclasses.replace(row, pass_us=PASS_US) if row.arm == "mla/packed" else row
        for row in rows
    ]


def table_of(times: Times, key: Key = KEY, measured_at: str = "2025-01-01T00:00:00Z") -> Table:
    """The table of a sweep with these true times."""
    return Table(key, DEVICE, tuple(measured(times)), "made up", measured_at)
