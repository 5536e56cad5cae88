"""The simulated scheduler: each token is computed once, chunks hold, prefixes are shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.autotune.workload.arrivals import Arrival, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest
from nsa_tune.autotune.workload.simulation import (
    Latencies,
    Pass,
    SchedulerConfig,
    passes,
    simulated,
)
from tests.autotune.workload.strategies import requests

ENGINE = SchedulerConfig(chunk_tokens=1000, next_n=2, acceptance=0.5, max_running=4)

in_order = requests.map(lambda found: sorted(found, key=lambda one: one.arrival_s))


def run(found: list[TraceRequest], engine: SchedulerConfig = ENGINE) -> list[Batch]:
    return [one.batch() for one in passes(found, engine)]


def words(found: list[TraceRequest], engine: SchedulerConfig = ENGINE) -> list[str]:
    return [str(batch) for batch in run(found, engine)]


@given(in_order)
@settings(max_examples=50)
def test_without_a_cache_every_input_token_is_computed_once(found: list[TraceRequest]) -> None:
    batches = run(found, replace(ENGINE, pool_tokens=0))

    assert sum(b.q_tokens for b in batches if b.mode == "extend") == sum(
        one.input_tokens for one in found
    )


@given(in_order)
@settings(max_examples=50)
def test_limits_hold_and_every_request_is_served(found: list[TraceRequest]) -> None:
    batches = run(found)
    extends = [batch for batch in batches if batch.mode == "extend"]
    decodes = [batch for batch in batches if batch.mode != "extend"]

    assert all(batch.q_tokens <= ENGINE.chunk_tokens for batch in extends)
    assert all(batch.batch_size <= ENGINE.max_running for batch in decodes)
    decoded = sum(one.output_tokens - 1 for one in found)
    assert sum(batch.batch_size for batch in decodes) * ENGINE.kept >= decoded


def test_a_long_request_is_prefilled_in_chunks_before_any_decode() -> None:
    assert words([TraceRequest(0.0, 2500, 3)]) == [
        "extend:0+1000", "extend:1000+1000", "extend:2000+500",
        "target_verify:n2:2502", "target_verify:n2:2503",
    ]  # fmt: skip


def test_what_is_left_of_a_chunk_goes_to_the_next_request() -> None:
    assert words([TraceRequest(0.0, 700, 1), TraceRequest(0.0, 600, 1)])[:2] == [
        "extend:0+700,0+300", "extend:300+300",
    ]  # fmt: skip


def test_a_shared_prefix_is_read_from_the_cache() -> None:
    found = [TraceRequest(0.0, 600, 1, (1, 2)), TraceRequest(5.0, 800, 1, (1, 3))]

    assert "extend:512+288" in words(found)


def test_a_whole_input_in_the_cache_still_computes_its_last_token() -> None:
    found = [TraceRequest(0.0, 512, 1, (1,)), TraceRequest(5.0, 512, 1, (1,))]

    assert "extend:511+1" in words(found)


def test_the_least_recently_used_block_is_evicted() -> None:
    small = replace(ENGINE, pool_tokens=1024)
    found = [TraceRequest(float(i), 600, 1, (b, b)) for i, b in enumerate((1, 2, 1, 3, 2))]

    extends = [word for word in words(found, small) if word.startswith("extend")]

    assert extends == [
        "extend:0+600", "extend:0+600", "extend:599+1", "extend:0+600", "extend:0+600",
    ]  # fmt: skip


def test_running_requests_decode_together_until_each_ends() -> None:
    found = [TraceRequest(0.0, 10, 3), TraceRequest(0.0, 20, 5)]  # prefills give the first token

    assert words(found, replace(ENGINE, next_n=1)) == [
        "extend:0+10,0+20", "decode:n1:11,21", "decode:n1:12,22", "decode:n1:23", "decode:n1:24",
    ]  # fmt: skip


def test_a_request_waits_while_too_many_run() -> None:
    one_at_a_time = replace(ENGINE, max_running=1, next_n=1)

    assert words([TraceRequest(0.0, 10, 1), TraceRequest(0.0, 20, 1)], one_at_a_time) == [
        "extend:0+10", "decode:n1:11", "extend:0+20", "decode:n1:21",
    ]  # fmt: skip


# --- priced passes, several told as one


def told_as_one(found: list[TraceRequest], engine: SchedulerConfig) -> list[tuple[str, int]]:
    def seconds(one: Pass) -> float:
        return 0.01 if one.is_extend else 0.02

    return [
        (str(one.batch()), one.steps)
        for one in simulated(arrivals(found, ENGINE.pool_tokens), engine, seconds)
    ]


@given(in_order, st.integers(1, 3))
@settings(max_examples=50)
def test_the_sums_of_a_pass_are_those_of_its_batch(found: list[TraceRequest], next_n: int) -> None:
    engine = replace(ENGINE, next_n=next_n, acceptance=1.0)
    for one in simulated(arrivals(found, ENGINE.pool_tokens), engine, lambda one: 0.01):
        batch = one.batch()
        mean = batch.kv_tokens // batch.batch_size
        longest = batch.max_kv if batch.mode == "extend" else mean
        own = (batch.batch_size, batch.q_tokens, batch.kv_tokens, longest, batch.pairs)
        assert one.sums == own


@given(in_order)
@settings(max_examples=50)
def test_several_decode_passes_told_as_one_are_as_many(found: list[TraceRequest]) -> None:
    at_once = [one._replace(arrival_s=0.0) for one in found]

    told = sum(steps for word, steps in told_as_one(at_once, ENGINE) if "verify" in word)

    assert told == sum(batch.mode != "extend" for batch in run(at_once))


def test_a_request_that_may_run_ends_the_passes_that_are_told_as_one() -> None:
    engine = replace(ENGINE, next_n=1)
    found = [TraceRequest(0.0, 10, 20), TraceRequest(0.05, 30, 1)]

    assert told_as_one(found, engine) == [
        ("extend:0+10", 1), ("decode:n1:11", 2), ("extend:0+30", 1), ("decode:n1:31,13", 1),
        ("decode:n1:14", 16),
    ]  # fmt: skip


def test_the_first_token_comes_when_the_last_chunk_ends() -> None:
    found = [TraceRequest(0.0, 2500, 1), TraceRequest(0.005, 100, 1)]

    waits = latencies(found, ENGINE).first_token_s

    assert [round(wait, 6) for wait in waits] == [0.03, 0.025]


def test_a_first_token_is_handed_over_when_the_next_prefill_is_launched() -> None:
    found = [TraceRequest(0.0, 100, 1), TraceRequest(0.005, 100, 1)]

    for launched, first_s in (((0.007, 0.0), 0.014), ((0.007, 0.5), 0.015)):
        waits = latencies(found, ENGINE, launched).first_token_s
        assert [round(wait, 6) for wait in waits] == [first_s, 0.015]


def latencies(
    found: list[TraceRequest], engine: SchedulerConfig, launched: tuple[float, float] = (0, 0)
) -> Latencies:
    def seconds(one: Pass) -> float:
        one.launch_s, one.unqueued = launched if one.is_extend else (0, 0)
        return 0.01

    told = Latencies()
    assert [*simulated(arrivals(found, engine.pool_tokens), engine, seconds, latencies=told)]
    return told


def test_a_request_may_be_sent_when_another_has_ended() -> None:
    told = Latencies()

    def sent() -> Iterator[Arrival | None]:
        yield Arrival(0.0, 10, 2, 0)
        while not told.ended_s:
            yield None
        yield Arrival(told.ended_s[0] + 1, 20, 1, 0)

    engine = replace(ENGINE, next_n=1)
    starts = [one.start_s for one in simulated(sent(), engine, lambda one: 0.5, latencies=told)]

    assert starts == [0.0, 0.5, 2.0, 2.5]


def test_prefills_of_others_delay_the_tokens_of_a_running_request() -> None:
    engine = replace(ENGINE, next_n=1)
    alone = [TraceRequest(0.0, 10, 5)]

    assert latencies(alone, engine).per_token_s == [pytest.approx(4 * 0.01 / 4)]
    both = latencies([*alone, TraceRequest(0.025, 30, 1)], engine).per_token_s
    assert both == [pytest.approx(5 * 0.01 / 4)]


def test_a_request_waits_until_the_pool_has_room_for_it() -> None:
    engine = replace(ENGINE, next_n=1, pool_tokens=60)
    found = [TraceRequest(0.0, 40, 3), TraceRequest(0.0, 30, 1)]

    assert words(found, engine) == [
        "extend:0+40", "decode:n1:41", "decode:n1:42", "extend:0+30", "decode:n1:31",
    ]  # fmt: skip


def test_a_request_larger_than_the_pool_still_ends() -> None:
    assert words([TraceRequest(0.0, 40, 1)], replace(ENGINE, next_n=1, pool_tokens=1))
