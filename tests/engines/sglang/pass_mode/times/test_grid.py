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
from nsa_tune.engines.sglang.pass_mode.times.grid import Grid, exp2, log2, together
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime


@given(st.floats(1e-3, 1e12))
def test_the_logarithm_is_near_log2_and_has_an_inverse(value: float) -> None:
    assert math.log2(value) - 0.087 <= log2(value) <= math.log2(value) + 1e-9
    assert exp2(log2(value)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("module", [grid, pass_times, choice])
def test_the_mathematical_library_has_no_say(module: ModuleType) -> None:
    """Hosts of one engine may have different ones, whose last bits differ."""
    exact = {"floor", "frexp", "ldexp", "sqrt"}
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


GRAPHS = Grid([
    PassTime(PassMode.SPARSE_GRAPH, size, context, us)
    for size, context, us in ((512, 1000, 10.0), (512, 9000, 14.0), (2048, 1000, 40.0),
                              (2048, 9000, 56.0))
])  # fmt: skip
"""A way that never waits for the host."""


def test_what_the_gpu_did_while_it_waited_is_told_by_a_way_that_does_not_wait() -> None:
    """SGLang's own way takes the graphs' time, or 30 us of the host."""
    waited = PassTime(PassMode.ENGINE, 512, 9000, 30.0, host_us=29.0)
    times = [waited, PassTime(PassMode.ENGINE, 2048, 9000, 56.0, host_us=30.0)]

    plain, told = Grid(times), Grid(times, unhindered=GRAPHS)

    # By the waiting pass alone 1280 tokens, half-way, take (30 + 56) / 2.
    assert plain.pass_us(1280, 9000) == pytest.approx(43)
    assert told.pass_us(1280, 9000) == pytest.approx(together(35, 30))
    assert told.pass_us(600, 9000) == pytest.approx(30, rel=0.01)


def test_a_pass_that_waited_works_no_less_than_a_smaller_one_and_no_longer_than_it_took() -> None:
    """Other passes wait for the host for 60 us; that tells nothing of the GPU's work."""
    times = [
        *(PassTime(PassMode.ENGINE, size, 9000, 60.0, host_us=59.0) for size in (128, 256, 512)),
        PassTime(PassMode.ENGINE, 2048, 250, 88.0, host_us=66.0),
        PassTime(PassMode.ENGINE, 2048, 1000, 100.0, host_us=93.0),
    ]

    assert Grid(times).pass_us(2048, 250) == Grid(times).pass_us(2048, 600) == 88
    assert Grid(times, unhindered=GRAPHS).pass_us(2048, 250) == pytest.approx(together(88, 60))
    assert Grid(times).pass_us(512, 9000) == 60


def test_fewer_keys_than_were_measured_cost_less_as_they_do_in_graphs() -> None:
    times = [PassTime(PassMode.ENGINE, 2048, 9000, 112.0, host_us=30.0)]

    assert Grid(times).pass_us(2048, 5000) == pytest.approx(112)
    assert Grid(times, unhindered=GRAPHS).pass_us(2048, 5000) == pytest.approx(96)
    assert Grid(times, unhindered=GRAPHS).pass_us(2048, 100) == pytest.approx(80)


def test_between_two_sizes_a_pass_grows_as_one_that_was_measured_closer() -> None:
    times = [PassTime(PassMode.SPARSE_GRAPH, size, 1, us) for size, us in ((512, 20.0), (2048, 60))]
    closer = [(128, 9.0), (512, 10.0), (1024, 12.0), (2048, 20.0)]

    assert Grid(times).pass_us(1280, 1) == pytest.approx(40)
    assert Grid(times, closer).pass_us(1024, 1) == pytest.approx(28)
    assert Grid(times, closer).pass_us(1536, 1) == pytest.approx(44)
    assert Grid(times, closer[:2]).pass_us(1280, 1) == pytest.approx(40)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_host_and_gpu_together_take_as_long_as_the_slower_or_a_little_longer(
    host: float, gpu: float
) -> None:
    assert max(host, gpu) * 0.999 <= together(host, gpu) <= max(host, gpu) * 2**0.125 * 1.001
    assert together(host, gpu) == together(gpu, host)


def test_beyond_long_contexts_keys_cost_what_they_did_between_them() -> None:
    times = [PassTime(PassMode.SPARSE_GRAPH, 512, at, us) for at, us in ((9000, 14), (50000, 24))]

    assert Grid(times).pass_us(512, 91000) == pytest.approx(34)
    assert Grid(times).pass_us(512, 130000) is None
    assert Grid(times[:1]).pass_us(512, 10000) == pytest.approx(14)
    assert Grid(times[:1]).pass_us(512, 11000) is None
