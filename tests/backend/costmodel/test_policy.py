"""A policy: which arms stand where, and what a bad row does."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import StoreCorrupt
from nsa_tune.backend.baselines import SGLANG_0_5_23
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.reports.analysis.cached_policy import CachedPolicy
from tests.backend.fake_point import (
    BATCHES,
    FAKE,
    FEATURES,
    PASS_US,
    SETTING,
    Times,
    linear,
    measured,
    policy_of,
    sharing_rows,
)

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 8),
}


def _failed(arm: str, batch: Batch, status: Status = Status.FAILED) -> Measurement:
    return Measurement(FAKE.name, str(batch), arm, status, reason="out of memory")


def test_every_measured_arm_has_an_estimate_in_declared_order() -> None:
    estimates = policy_of(TIMES).estimates(Batch.extend([512], [64]))

    assert list(estimates) == ["mha/dense", "mla/wide", "mla/packed"]
    assert estimates["mla/wide"].latency_us == pytest.approx(TIMES["mla/wide"](BATCHES[14]))


def test_estimates_are_there_for_forbidden_arms_too() -> None:
    batch, policy = Batch.extend([8192], [64]), policy_of(TIMES)
    estimates, allowed = policy.estimates(batch), policy.survey(batch).latencies

    assert "mha/dense" in estimates and "mha/dense" not in allowed
    times = {arm: estimates[arm].latency_us for arm in allowed}
    assert policy.times_us(batch, allowed) == times
    assert policy.times_us(batch, ["mla/wide"]) == {"mla/wide": times["mla/wide"]}


def test_a_survey_puts_each_candidate_in_one_place() -> None:
    survey = policy_of(TIMES).survey(Batch.extend([8192], [8000]))

    assert list(survey.latencies) == ["mla/wide"]
    assert survey.forbidden == {
        "mha/dense": "too long for dense",
        "mla/packed": "more than 4096 rows",
    }


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(list(KVLayout)),
)
@settings(max_examples=100)
def test_no_arm_is_surveyed_past_its_guards(
    lens: list[tuple[int, int]], captured: bool, layout: KVLayout
) -> None:
    setting = replace(SETTING, layout=layout)
    batch = Batch.extend([p for p, _ in lens], [n for _, n in lens], captured=captured)

    survey = _BY_LAYOUT[layout].survey(batch)

    for name in survey.latencies:
        assert FAKE.arm(name).allowed(batch, setting) is None
    for name, reason in survey.forbidden.items():
        assert FAKE.arm(name).allowed(batch, setting) == reason


_BY_LAYOUT = {layout: policy_of(TIMES, replace(SETTING, layout=layout)) for layout in KVLayout}


def test_references_stand_only_where_no_kernel_does() -> None:
    everywhere = {**TIMES, "mla/plain": linear(1, 1, 1)}

    assert "mla/plain" not in policy_of(everywhere).survey(BATCHES[0]).latencies
    assert "mla/plain" in policy_of(everywhere).estimates(BATCHES[0])


def test_an_arm_that_was_never_measured_is_allowed_but_unknown() -> None:
    survey = policy_of({"mla/wide": TIMES["mla/wide"]}).survey(Batch.extend([0], [64]))

    assert survey.latencies["mla/packed"] is None
    assert survey.latencies["mla/wide"] is not None


def test_an_arm_is_not_taken_near_where_it_failed() -> None:
    rows = measured(TIMES)
    big = Batch.extend([8192], [4096])
    rows = [row for row in rows if (row.arm, row.batch) != ("mla/packed", str(big))]
    policy = Policy.fit(FAKE, SETTING, [*rows, _failed("mla/packed", big)])

    near, far = Batch.extend([8000], [4000]), Batch.extend([8000], [100])
    reason = "failed on extend:8192+4096: out of memory"
    assert policy.survey(near).forbidden["mla/packed"] == reason
    assert "mla/packed" not in policy.survey(far).forbidden
    assert policy.survey(far).latencies["mla/packed"] is not None


def test_an_arm_that_was_wrong_once_is_not_taken_anywhere() -> None:
    rows = measured(TIMES)
    rows[-1] = replace(_failed(rows[-1].arm, BATCHES[-1], Status.WRONG), reason="off by 0.3")
    policy = Policy.fit(FAKE, SETTING, rows)

    survey = policy.survey(Batch.extend([0], [1]))

    assert survey.forbidden == {rows[-1].arm: f"wrong output on {BATCHES[-1]}: off by 0.3"}


def test_a_later_row_replaces_an_earlier_one() -> None:
    rows = measured(TIMES)
    batch = Batch.parse(rows[0].batch)
    policy = Policy.fit(FAKE, SETTING, [*rows, replace(rows[0], latency_us=99.0)])

    assert policy.estimates(batch)[rows[0].arm].latency_us == pytest.approx(99)


def test_rows_of_other_points_and_of_unknown_arms_are_left_out() -> None:
    rows = measured(TIMES)
    foreign = [
        replace(rows[0], point="other", batch="not a batch"),
        replace(rows[0], arm="mla/future", batch="not a batch"),
    ]

    policy = Policy.fit(FAKE, SETTING, rows + foreign)

    assert policy.estimates(BATCHES[3]) == policy_of(TIMES).estimates(BATCHES[3])


@pytest.mark.parametrize("text", ["nonsense", "extend:0+0", "decode:n1:64"])
def test_a_row_for_an_impossible_batch_is_a_corrupt_table(text: str) -> None:
    rows = measured(TIMES)

    with pytest.raises(StoreCorrupt, match="the table has a row"):
        Policy.fit(FAKE, SETTING, [*rows, replace(rows[0], batch=text)])


def test_the_measured_batches_are_those_where_something_succeeded() -> None:
    failed = Batch.extend([1], [1])
    rows = [*measured(TIMES, BATCHES[:5]), _failed("mla/wide", failed)]

    policy = Policy.fit(FAKE, SETTING, rows)

    assert {str(batch) for batch in policy.measured} == {str(batch) for batch in BATCHES[:5]}


def test_the_spread_of_an_arm_without_a_surface_is_infinite() -> None:
    policy = policy_of({"mla/wide": TIMES["mla/wide"]})

    assert policy.spread("mla/wide") < 0.01
    assert policy.spread("mla/packed") == float("inf")


def test_a_batch_that_cannot_be_placed_leaves_the_arms_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaks = FEATURES._replace(
        names=("odd",), features=lambda batch: (1 / (batch.q_tokens - 77),)
    )  # fmt: skip
    policy = Policy.fit(replace(FAKE, features=lambda setting: breaks), SETTING, measured(TIMES))

    with caplog.at_level(logging.WARNING):
        survey = policy.survey(Batch.extend([0], [77]))

    assert set(survey.latencies.values()) == {None}
    assert "fake cannot place extend:0+77" in caplog.text
    assert policy.estimates(Batch.extend([0], [77])) == {}


_HASHED = """
from nsa_tune.backend.types.batch import Batch
from tests.backend.fake_point import policy_of, linear
from math import sin
times = {a: (lambda b, a=a: linear(0.5, 0.1, 9)(b) * (1.2 + sin(b.q_tokens + len(a))))
         for a in ("mha/dense", "mla/wide", "mla/packed")}
policy = policy_of(times)
print([policy.estimates(Batch.extend([p], [n])) for p in (0, 99, 3000) for n in (1, 50, 2000)])
"""


def test_estimates_do_not_depend_on_the_hash_seed() -> None:
    root = Path(__file__).parents[3]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _HASHED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert "latency_us" in outputs.pop()


@pytest.mark.parametrize(
    ("layers", "share_us", "faster"),
    [(1, PASS_US, "mla/wide"), (61, PASS_US / 61, "mla/packed"), (0, PASS_US / 61, "mla/packed")],
)
def test_a_layer_takes_its_share_of_what_a_pass_costs(
    layers: int, share_us: float, faster: str
) -> None:
    policy = Policy.fit(FAKE, replace(SETTING, layers=layers), sharing_rows())

    for batch in (BATCHES[14], Batch.extend([3000], [300])):
        survey = policy.survey(batch).latencies
        times = {name: time for name, time in survey.items() if time is not None}
        assert min(times, key=times.__getitem__) == faster
        assert times["mla/packed"] == pytest.approx(40 + 0.01 * batch.q_tokens + share_us, rel=0.01)
        estimates = policy.estimates(batch)
        assert min(estimates, key=lambda name: estimates[name].latency_us) == faster
        packed = estimates["mla/packed"]
        assert packed.latency_us == pytest.approx(times["mla/packed"], rel=0.01)
        assert packed.low_us <= packed.latency_us <= packed.high_us


def test_the_share_of_a_pass_is_added_once() -> None:
    setting = replace(SETTING, layers=10)
    policies: list[Policy] = [
        Policy.fit(FAKE, setting, sharing_rows()),
        Policy.fit(FAKE, setting, iter(sharing_rows())),
        CachedPolicy.of(FAKE, setting, sharing_rows(), SGLANG_0_5_23, {}),
    ]
    assert len({policy.rows for policy in policies}) == 1
    rows = policies[0].rows
    packed = next(row for row in rows if (row.arm, row.batch) == ("mla/packed", str(BATCHES[0])))

    assert packed.latency_us == pytest.approx(40.01 + 30)
    assert packed.high_us == pytest.approx(40.01 * 1.001 + 30)
    assert packed.pass_us == PASS_US
