"""How sparse attention arms get at the tokens of pools that their kernels do not read."""

from __future__ import annotations

from importlib import import_module

from nsa_tune.backend.dispatch.plan import COPIES
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import SparseArm

ARMS = [arm for point in POINTS.values() for arm in point.arms if isinstance(arm, SparseArm)]


def test_arms_of_one_name_copy_the_same_pools_that_they_take_by_a_kernel_that_is_there() -> None:
    for arm in ARMS:
        assert COPIES[arm.choice] == arm.copied
        assert arm.copied.keys() <= arm.layouts
        for kernel in arm.copied.values():
            module, _, function = kernel.partition(".")
            assert callable(getattr(import_module(f"nsa_tune.backend.kernels.{module}"), function))


def test_every_arm_of_a_sparse_question_says_what_is_copied() -> None:
    names = {arm.choice for arm in ARMS}

    assert {arm.choice for arm in POINTS["decode"].arms} <= names
    assert {a.choice for a in POINTS["prefill"].arms if a.name.startswith("mla/")} <= names
