"""Priced against measured: made-up passes whose rest is known, and grids drawn from a trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from benchmarks import draw_passes, priced
from nsa_tune import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.costs.own_copies import longer_us
from nsa_tune.reports.replay.rest import TERMS, RestOfPass
from tests.reports.replay.test_prices import pricer

REST = {"pass": 9.0, "q_tokens": 0.025}
KERNELS = ("flashmla_kv", "flashmla_sparse")


def measured(path: Path, noise: float = 0.0) -> list[Batch]:
    """Write passes that take their price and `REST`, the first of each far too long."""
    random = Random(1)
    batches = [
        Batch.extend([random.randrange(0, 400) * 64], [random.randrange(64, 8192)])
        for _ in range(24)
    ]
    lines = []
    for batch in batches:
        ((prefix, new),) = batch.lens or ()
        for impl in KERNELS:
            answers = {"prefill_path": "mla", "sparse_prefill": impl}
            steps, _ = pricer().of_choices(batch, answers, graph=True)
            attention_ms = sum(one.latency_us for one in steps.values()) / 1e3
            ms = attention_ms + REST["pass"] + REST["q_tokens"] * new
            for times in (50.0, 1.0, 1.0):
                line = {
                    "mode": "EXTEND", "bs": 1, "prefix": [prefix], "new": [new], "q": new,
                    "kv": prefix + new, "gpu_ms": ms * times * random.gauss(1, noise),
                    "host_ms": 5.0, "graph": True, "mha": False, "impl": impl,
                }  # fmt: skip
                lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return batches


def test_passes_are_priced_with_the_copies_that_sglang_made(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl")

    plugin, sglang = (
        priced.ran(tmp_path / "passes.jsonl", pricer(), sglang_copies=one) for one in (False, True)
    )

    for one, other in zip(plugin, sglang, strict=True):
        sparse = one.impl == "flashmla_sparse"
        longer_by_us = 61 * longer_us(one.batch, KVLayout.FP8_PACKED, 16) if sparse else 0.0
        assert 1e3 * (other.priced_ms - one.priced_ms) == pytest.approx(longer_by_us, abs=1e-6)


def test_the_rest_that_passes_were_made_with_is_found_again(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl")
    passes = priced.ran(tmp_path / "passes.jsonl", pricer())
    assert len(passes) == 48
    assert {one.repeats for one in passes} == {2}

    document, errors = priced.rest_of(passes, "made up")

    assert document["gpu_ms"]["graph"] == pytest.approx(REST, rel=1e-3)
    assert document["host_ms"] == {"graph": 5.0}
    assert errors["graph"]["p90"] < 1e-3
    (tmp_path / "rest.json").write_text(json.dumps(document))
    assert RestOfPass.read(tmp_path / "rest.json").attention == ("prefill",)


def test_a_pass_in_a_graph_counts_with_the_tokens_of_its_graph(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl")

    passes = priced.ran(tmp_path / "passes.jsonl", pricer(), (8192, 1024))

    for one in passes:
        size = next(size for size in (1024, 8192) if size >= one.batch.q_tokens)
        eager = size > 2 * one.batch.q_tokens
        counted = dict(zip(TERMS, one.terms, strict=True))["q_tokens"]
        assert counted == (one.batch.q_tokens if eager else size)
    assert {one.padding > 0 for one in passes} == {True, False}


def test_differences_of_kernels_need_no_rest(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl")
    passes = priced.ran(tmp_path / "passes.jsonl", pricer())

    errors = priced.difference_errors(passes)

    assert errors == pytest.approx([0.0] * len(errors), abs=1e-9)
    assert len(errors) > 10


def test_noise_is_told(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl", noise=0.05)
    passes = priced.ran(tmp_path / "passes.jsonl", pricer())

    _, errors = priced.rest_of(passes, "made up")

    assert 0.005 < errors["graph"]["median"] < 0.1


def test_attention_is_compared_step_by_step(tmp_path: Path) -> None:
    batches = measured(tmp_path / "passes.jsonl")
    passes = priced.ran(tmp_path / "passes.jsonl", pricer())
    lines: list[dict[str, object]] = []
    for one in passes:
        ((prefix, new),) = one.batch.lens or ()
        # Selection has no price here, so that it counts in no step and not in their sum.
        steps_ms = {"prefill": 0.8 * one.steps_ms["prefill"], "indexer_topk": 5.0}
        lines.append(
            {"prefix": [prefix], "new": [new], "mha": False, "impl": one.impl,
             "attention_ms": sum(steps_ms.values()), "steps_ms": steps_ms}
        )  # fmt: skip
    ((prefix, new),) = batches[0].lens or ()
    profile: dict[str, object] = {"case": f"{prefix}:{new}:1", "kinds_ms": {"indexer logits": 1.0}}
    lines += [{"case": "d:32:8192", "kinds_ms": {}}, profile]
    (tmp_path / "attention.jsonl").write_text("\n".join(map(json.dumps, lines)))

    errors = priced.attention_errors(passes, tmp_path / "attention.jsonl")

    assert errors["attention"] == pytest.approx([0.25] * 48)
    assert errors["prefill"] == pytest.approx([0.25] * 48)
    assert "indexer_topk" not in errors


def test_attention_without_steps_is_compared_as_a_whole(tmp_path: Path) -> None:
    measured(tmp_path / "passes.jsonl")
    one, *_ = priced.ran(tmp_path / "passes.jsonl", pricer())
    ((prefix, new),) = one.batch.lens or ()
    line = {"prefix": [prefix], "new": [new], "mha": False, "impl": one.impl,
            "attention_ms": 0.8 * one.priced_ms}  # fmt: skip
    (tmp_path / "attention.jsonl").write_text(json.dumps(line))

    assert priced.attention_errors([one], tmp_path / "attention.jsonl") == {
        "attention": [pytest.approx(0.25)]
    }


def test_other_passes_are_left_out(tmp_path: Path) -> None:
    line = {"mode": "EXTEND", "bs": 1, "prefix": [0], "new": [9], "gpu_ms": 1.0, "graph": True}
    lines = [
        {**line, "draft": True}, {**line, "pass_mode": "decode_graph"}, {**line, "bs": 2},
        {**line, "mode": "MIXED"}, {**line, "gpu_ms": 0},
        {"mode": "DECODE", "bs": 4, "kv": 4001, "gpu_ms": 9.0, "graph": True},
    ]  # fmt: skip
    (tmp_path / "passes.jsonl").write_text("\n".join(map(json.dumps, lines)))

    (one,) = priced.ran(tmp_path / "passes.jsonl", pricer())

    assert one.kind == "decode"
    assert one.batch.max_kv == 1001


def test_a_spread_is_of_sizes() -> None:
    found = priced.spread([-0.1, 0.1, 0.0, 0.05, -0.05])

    assert (found["median"], found["worst"], found["passes"]) == (0.05, 0.1, 5)
    assert found["mean"] == pytest.approx(0)
    assert "nothing to compare" in priced.told("x", priced.spread([]))


def test_drawn_passes_are_whole_pages_and_of_all_kinds() -> None:
    random = Random(2)
    found = [draw_passes.whole_pages([(1000, 8192)])] * 500
    found += [draw_passes.whole_pages([(random.randrange(9000), 70)]) for _ in range(5)]
    found += [((0, 100), (64, 200))]

    chosen = draw_passes.drawn(found, 7, Random(0))

    assert ((960, 8192),) in chosen
    assert ((0, 100), (64, 200)) in chosen
    assert len(chosen) == len(set(chosen)) == 7
    assert all(prefix % 64 == 0 for one in chosen for prefix, _ in one)


def test_a_fit_that_is_far_off_on_other_batches_is_left_out(tmp_path: Path) -> None:
    """Times that have nothing to do with their batches."""
    measured(tmp_path / "passes.jsonl", noise=0.9)
    passes = priced.ran(tmp_path / "passes.jsonl", pricer())

    document, errors = priced.rest_of(passes, "made up", "fp8")

    assert errors["graph"]["median"] > 0.25
    assert document["gpu_ms"] == {}
    assert document["kv_dtype"] == "fp8"
