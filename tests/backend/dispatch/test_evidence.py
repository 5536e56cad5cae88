"""Evidence: what a decision rests on, what it may cost, and what would change it."""

from __future__ import annotations

import re

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.evidence import moved
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def opened() -> Dispatcher:
    """The shipped table of the H100."""
    return Dispatcher.open(gpu=H100, model="deepseek-v3.2", heads=128, kv_dtype="fp8")


def test_rows_are_measurements_of_the_table_with_weights_that_sum_to_1(
    opened: Dispatcher,
) -> None:
    (path,) = (p for p in shipped() if p.stem == "h100-80gb-hbm3_deepseek-v3.2_h128_fp8")
    known = {(row.batch, row.arm, row.latency_us) for row in read_text(path).measurements}

    rows = opened.plan(Batch.extend([1000], [100])).reasons["prefill_path"].rows

    assert {(row.batch, row.arm, row.latency_us) for row in rows} <= known
    for arm in {row.arm for row in rows}:
        assert sum(row.weight for row in rows if row.arm == arm) == pytest.approx(1)


def test_guards_are_listed_up_to_the_one_that_forbids(opened: Dispatcher) -> None:
    reason = opened.plan(Batch.extend([4000], [100])).reasons["prefill_path"]

    dense = [one for one in reason.consulted if one.arm == "mha/fa3"]
    assert [one.guard for one in dense] == ["some_rows", "dense_exact"]
    assert dense[-1].reason == reason.guards["mha"]
    sparse = [one for one in reason.consulted if one.arm == "mla/flashmla_sparse"]
    assert [one.reason for one in sparse] == [None] * len(sparse)
    assert all(one.source for one in reason.consulted)


def test_the_key_is_that_of_the_measurements_that_decided(opened: Dispatcher) -> None:
    assert opened.table is not None
    assert opened.plan(Batch.extend([0], [9])).reasons["prefill_path"].key == opened.table.key
    nowhere = Dispatcher.open(gpu="?", model="deepseek-v3.2", heads=128, kv_dtype="fp8")
    assert nowhere.plan(Batch.extend([0], [9])).reasons["prefill_path"].key is None


@pytest.mark.parametrize(
    "batch",
    [Batch.extend([1000], [100]), Batch.extend([1800] * 4, [40] * 4), Batch.extend([60000], [50])],
    ids=str,
)
def test_what_is_said_to_change_the_choice_changes_it(opened: Dispatcher, batch: Batch) -> None:
    axes = {"new tokens": 0, "prefix tokens": 0, "sequences": 0}
    plan = opened.plan(batch.sums)
    for name in ("prefill_path", "sparse_prefill"):
        for other, text in plan.reasons[name].to_win.items():
            found = re.search(r"(\d+) (new token|prefix token|sequence)(s?).* instead of", text)
            if found is None or "where none forbids it" in text:
                continue
            assert bool(found[3]) == (found[1] != "1")
            axis = f"{found[2]}s"
            changed = moved(batch.sums, axis, int(found[1]))
            assert changed is not None
            assert getattr(opened.plan(changed), name) == other != getattr(plan, name)
            axes[axis] += 1
    assert sum(axes.values())


def test_an_explanation_has_all_of_it(opened: Dispatcher) -> None:
    text = opened.explain(Batch.extend([1000], [100]))

    assert "key     NVIDIA H100 80GB HBM3, driver" in text
    assert "expected regret" in text
    assert "would win with" in text
    assert "estimates are interpolated from" in text
    assert "limits checked" in text
    assert (
        "    prefill mha/fa3: allowed (limits kept: some_rows, dense_exact, chunk_capacity, "
        "not_captured, " in text
    )


def test_an_explanation_names_the_limit_that_forbids_an_arm(opened: Dispatcher) -> None:
    text = opened.explain(Batch.extend([4000], [100]))

    assert "    prefill mha/fa3: forbidden by dense_exact (limits kept: some_rows)" in text


def test_arms_of_two_points_with_one_name_are_told_apart(opened: Dispatcher) -> None:
    """`decode` and `indexer_metadata` both have an arm `triton`."""
    text = opened.explain(Batch.decode([5000]))

    limits = text.partition("limits checked\n")[2].splitlines()
    arms = [line.partition(":")[0].strip() for line in limits]
    assert {"decode triton", "indexer_metadata triton"} <= set(arms)
    assert len(arms) == len(set(arms))
    (decode,) = (line for line in limits if line.strip().startswith("decode triton:"))
    assert decode.endswith("(limits kept: some_rows, triton_shape, triton_bytes)")


def test_every_reason_of_any_plan_can_be_made(opened: Dispatcher) -> None:
    for batch in (
        Batch.extend([0], [1]),
        Batch.extend([2**30], [2**20]),
        Batch.decode([7]),
        Batch.verify([50], 3),
        Batch.draft_extend([9000] * 5, 2, captured=True),
    ):
        for reason in opened.plan(batch).reasons.values():
            assert reason.text
            assert reason.verdict in Verdict
