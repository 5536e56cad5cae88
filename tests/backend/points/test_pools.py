"""What sparse attention arms read, and how they get at the tokens of other pools."""

from __future__ import annotations

import pytest

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.pools import READS, reach
from nsa_tune.backend.types.layouts import CONVERSIONS, KVLayout, Role
from nsa_tune.backend.types.point import SparseArm

ARMS = [
    (point.name, arm)
    for point in POINTS.values()
    for arm in point.arms
    if isinstance(arm, SparseArm)
]
_each = pytest.mark.parametrize(
    ("point", "arm"), ARMS, ids=[f"{point} {arm.name}" for point, arm in ARMS]
)


@_each
def test_arms_of_one_name_read_the_same(point: str, arm: SparseArm) -> None:
    assert READS[arm.choice] == arm.reads


@_each
def test_an_arm_gets_at_the_tokens_of_each_pool_that_it_takes(point: str, arm: SparseArm) -> None:
    role = Role.DECODE if point == "decode" else Role.PREFILL

    assert all(reach(arm.choice, pool, role) for pool in arm.layouts)


def test_every_arm_of_a_sparse_question_says_what_it_reads() -> None:
    names = {arm.choice for _, arm in ARMS}

    assert {arm.choice for arm in POINTS["decode"].arms} <= names
    assert {a.choice for a in POINTS["prefill"].arms if a.name.startswith("mla/")} <= names


def test_a_kernel_reads_what_its_conversion_writes() -> None:
    for conversion in CONVERSIONS:
        for name in conversion.readers - {"sparse_fwd"}:
            assert conversion.target in READS[name]


def test_a_pool_that_a_kernel_reads_is_not_converted() -> None:
    assert reach("flashmla_kv", KVLayout.FP8_PACKED, Role.PREFILL) == (None,)
    (way,) = reach("flashmla_sparse", KVLayout.FP8_PACKED, Role.PREFILL)
    assert way is not None
    assert way.kernel == "packed_fp8.dequantize"
    assert reach("fa3", KVLayout.FP8_PACKED, Role.DECODE) == ()
