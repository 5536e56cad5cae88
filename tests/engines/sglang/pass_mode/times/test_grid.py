"""What ranks interpolate is the same on all hosts, to the last bit."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering import choice
from nsa_tune.engines.sglang.pass_mode.times import grid, pass_times
from nsa_tune.engines.sglang.pass_mode.times.grid import exp2, log2
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime


@given(st.floats(1e-3, 1e12))
def test_the_logarithm_is_near_log2_and_has_an_inverse(value: float) -> None:
    assert math.log2(value) - 0.087 <= log2(value) <= math.log2(value) + 1e-9
    assert exp2(log2(value)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("module", [grid, pass_times, choice])
def test_the_mathematical_library_has_no_say(module: ModuleType) -> None:
    """Hosts of one engine may have different ones, whose last bits differ."""
    exact = {"floor", "frexp", "ldexp"}
    named = {name for name, value in vars(module).items() if getattr(math, name, None) is value}

    assert named == (exact if module is grid else set())
    assert not hasattr(module, "math")


@given(
    took=st.dictionaries(
        st.tuples(st.sampled_from((128, 512, 1024, 2048)), st.integers(1, 4000)),
        st.floats(1e3, 1e6),
        min_size=1,
        max_size=8,
    ),
    q_tokens=st.integers(1, 2048),
    context=st.integers(1, 4000),
)
def test_every_length_below_a_measured_one_has_a_time_within_the_measured(
    took: dict[tuple[int, int], float], q_tokens: int, context: int
) -> None:
    times = [PassTime(PassMode.EAGER, size, at, us) for (size, at), us in took.items()]

    pass_us = grid.Grid(times).pass_us(q_tokens, context)

    if any(size >= q_tokens and at >= context for size, at in took):
        assert pass_us is not None
        assert min(took.values()) * 0.999 <= pass_us <= max(took.values()) * 1.001
