"""Chunk sizes: sums of what the passes of one prompt are estimated to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune.backend.baselines import SGLANG_0_5_23
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import read_text
from nsa_tune.reports.analysis.chunk_sizes import ChunkCurve, ChunkPoint, chunk_curves
from nsa_tune.reports.analysis.report import PointReport, build
from tests.reports.synthetic import real_table, toy_point, toy_table

_WITH_INDEXER = "h200_deepseek-v3.2_h128_fp8"


@pytest.fixture(scope="module")
def point() -> PointReport:
    return build([real_table(points=("prefill",))]).sections[0].points[0]


def _of(point: PointReport, prompt: int, chunk: int) -> ChunkPoint:
    curve = next(curve for curve in point.chunks if curve.prompt == prompt)
    return next(one for one in curve.points if one.chunk == chunk)


def test_prompts_and_chunks_lie_within_what_was_measured(point: PointReport) -> None:
    most = max(batch.q_tokens for batch in point.policy.measured if batch.batch_size == 1)

    assert [curve.prompt for curve in point.chunks] == [4096, 16384, 65536, 131072]
    for curve in point.chunks:
        assert all(one.chunk <= min(curve.prompt, most) for one in curve.points)


def test_a_chunk_takes_its_fastest_allowed_arm(point: PointReport) -> None:
    one = _of(point, 4096, 2048)

    passes = [Batch.extend([0], [2048]), Batch.extend([2048], [2048])]
    best = []
    for batch in passes:
        estimates = point.policy.estimates(batch)
        allowed = point.policy.survey(batch).latencies
        best.append(min(estimates[a].latency_us for a in allowed if a in estimates))
    assert one.total_us == pytest.approx(sum(best))


def test_the_rule_takes_its_own_path_and_kernel(point: PointReport) -> None:
    one = _of(point, 4096, 2048)

    first, second = Batch.extend([0], [2048]), Batch.extend([2048], [2048])
    assert SGLANG_0_5_23.choose(point.point.questions[0], first, point.policy.setting) == "mha"
    expected = (
        point.policy.estimates(first)["mha/fa3"].latency_us
        + point.policy.estimates(second)["mla/flashmla_kv"].latency_us
    )
    assert one.default_us == pytest.approx(expected)


def test_the_indexers_time_is_in_a_prefills_chunk() -> None:
    table = read_text(next(path for path in shipped() if path.stem == _WITH_INDEXER))
    section = build([table]).sections[0]
    prefill, *indexer = (
        next(one for one in section.points if one.point.name == name)
        for name in ("prefill", "indexer_prefill", "indexer_topk")
    )
    alone = chunk_curves(prefill.policy, SGLANG_0_5_23)

    assert prefill.chunks[0].steps == ("indexer_prefill", "indexer_topk")
    for whole, part in zip(prefill.chunks[1].points, alone[1].points, strict=True):
        more = 0.0
        for start in range(0, prefill.chunks[1].prompt, whole.chunk):
            batch = Batch.extend([start], [whole.chunk])
            for step in indexer:
                every = step.policy.estimates(batch)
                allowed = step.policy.survey(batch).latencies
                more += min((every[arm].latency_us for arm in allowed), default=0.0)
        assert whole.total_us == pytest.approx(part.total_us + more)


def test_an_arm_that_no_chunk_of_a_size_allows_is_named_with_its_limit(point: PointReport) -> None:
    assert "mha/fa3" not in _of(point, 4096, 2048).limits
    assert "up to 2048 kv tokens" in _of(point, 16384, 4096).limits["mha/fa3"]


def test_the_best_size_has_the_highest_rate() -> None:
    points = tuple(ChunkPoint(size, us, None, ("a",), {}, False) for size, us in ((1, 9), (2, 4)))
    curve = ChunkCurve(1000, points)

    assert curve.best.chunk == 2
    assert curve.rate(4) == 250e6


def test_a_point_that_does_not_prefill_has_no_curves() -> None:
    (section,) = build([real_table(points=("indexer_layout",))]).sections

    assert section.points[0].chunks == ()


def test_a_point_that_is_not_of_prefill_alone_has_no_curves() -> None:
    point = toy_point()
    table = toy_table(point)
    schedule = replace(point, modes=frozenset(Mode))

    assert build([table], points={"toy": point}).sections[0].points[0].chunks
    assert build([table], points={"toy": schedule}).sections[0].points[0].chunks == ()


def test_any_point_that_prefills_has_curves() -> None:
    toy = toy_point()

    (curve,) = build([toy_table(toy)], points={"toy": toy}).sections[0].points[0].chunks

    assert curve.prompt == 4096
    # flat/a costs 100 + 0.1 a token, and the baseline takes the first declared: 10 + 1 a token.
    one = curve.points[-1]
    assert (one.chunk, one.arms) == (4096, ("flat/a",))
    assert one.total_us == pytest.approx(509.6)
    assert one.default_us == pytest.approx(4106)
