"""Times of another engine are taken where a few passes say that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.times.priors import (
    anchors,
    chosen_alike,
    kernel_place,
    missing,
    place_of,
    prior,
    rescaled,
)

ENGINE, DECODE = PassMode.ENGINE, PassMode.DECODE_GRAPH
KEY = {
    "gpu": "NVIDIA H200", "tp_size": 1, "sglang": "0.5.23", "torch": "2.14.1", "cpu": "a Xeon",
    "heads": 16, "prefill_sizes": [64, 512, 1024, 2048], "decode_sizes": [8, 64],
    "whole_pass_sizes": {},
}  # fmt: skip
KNOWN = [
    *(PassTime(ENGINE, size, 100, 1000.0 * size, False, 500.0) for size in (64, 512, 1024, 2048)),
    PassTime(ENGINE, 2048, 100, 99.0, padding=1000),
    *(PassTime(DECODE, size, 100, 100.0 * size) for size in (8, 64)),
]
KERNELS = [replace(time, mode=PassMode.TABLE_KERNEL) for time in KNOWN[:5]]
FA3 = {kernel_place(time): "fa3" for time in KERNELS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def _here(known: Iterable[PassTime], **factors: float) -> list[PassTime]:
    """What the anchors take in this engine."""
    places = anchors(known)
    return [
        replace(time, pass_us=factors[time.mode] * time.pass_us)
        for time in known if place_of(time) in places
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True), ({"sglang": "0.5.24", "torch": "2.15.0"}, True), ({"cpu": "an EPYC"}, True),
        ({"tp_size": 8}, True), ({"whole_pass_sizes": {"dense_graph": [64]}}, True),
        ({"decode_sizes": [4, 32], "draft_tokens": 4}, True), ({"prefill_sizes": [64]}, True),
        ({"heads": 32}, False), ({"new": 1}, False),
    ],
)  # fmt: skip
def test_a_prior_is_of_an_engine_that_differs_in_versions_host_and_ranks_only(
    changes: dict[str, object], *, fits: bool
) -> None:
    assert remembered.save(PassTimes(KEY, KNOWN, "a table"))
    key = KEY | changes

    assert (prior(key) is not None) == fits


def test_of_the_tables_kernels_those_are_measured_that_were_not_chosen_there() -> None:
    """Whatever the table is called: one of the same name may choose others."""
    timed = KERNELS[1:]
    known = PassTimes(KEY, [*KNOWN, *timed], "a table", kernels=FA3)

    # The first was SGLang's own kernel, and so was not timed.
    assert not missing(known, [*KNOWN, *KERNELS], FA3)
    assert chosen_alike(known, FA3) == [*KNOWN, *timed]
    other = FA3 | {kernel_place(timed[0]): "flashmla_sparse"}
    assert missing(known, [*KNOWN, *KERNELS], other) == {place_of(timed[0])}
    assert chosen_alike(known, other) == [*KNOWN, *timed[1:]]
    # Without a table none is chosen.
    assert not missing(known, KNOWN, {}) and chosen_alike(known, {}) == KNOWN


def test_times_kept_before_kernels_were_noted_hold_but_for_the_kernels() -> None:
    old = PassTimes(KEY, [*KNOWN, *KERNELS], "a table")

    assert chosen_alike(old, FA3) == KNOWN
    assert missing(old, [*KNOWN, *KERNELS], FA3) == frozenset(map(place_of, KERNELS))


def test_of_decode_graphs_that_verify_drafts_all_are_measured() -> None:
    assert remembered.save(PassTimes(KEY, KNOWN, None))
    found = prior(KEY | {"draft_tokens": 4, "decode_sizes": [8, 256]})

    assert found is not None and [*found.times] == KNOWN[:5]
    assert missing(found, KNOWN, {}) == frozenset(map(place_of, KNOWN[5:]))


def test_of_graphs_of_other_sizes_only_these_are_measured() -> None:
    assert remembered.save(PassTimes(KEY, KNOWN, None))
    found = prior(KEY | {"prefill_sizes": [64, 1024, 4096], "decode_sizes": [8, 16]})

    assert found is not None and [time.q_tokens for time in found.times] == [64, 1024, 8]
    new = replace(KNOWN[0], q_tokens=4096)
    # Behind a prefix 1024 tokens were not timed: there were larger graphs for that.
    behind = replace(new, q_tokens=1024, context=900)
    assert missing(found, [KNOWN[2], new, behind], {}) == {place_of(new), place_of(behind)}
    times = rescaled(found.times, [*_here(found.times, engine=1.1, decode_graph=1.0), new])
    assert times is not None and [time.q_tokens for time in times] == [64, 1024, 8, 4096]
    assert times[0].pass_us == pytest.approx(1.1 * KNOWN[0].pass_us)


def test_ways_that_have_no_graphs_here_spoil_nothing() -> None:
    dense = replace(KNOWN[1], mode=PassMode.DENSE_GRAPH)
    assert remembered.save(PassTimes(KEY, [*KNOWN, dense], None))
    assert (found := prior(KEY | {"decode_sizes": []})) and [*found.times] == KNOWN[:5]


def test_an_engine_with_the_same_graphs_comes_first() -> None:
    for changes in ({}, {"draft_tokens": 4}, {"prefill_sizes": [64, 2048]}, {"decode_sizes": [8]}):
        key = KEY | {"sglang": "0.5.24" if changes else "0.5.23"} | changes
        assert remembered.save(PassTimes(key, KNOWN, None))

    found = prior(KEY | {"sglang": "0.5.25"})
    assert found is not None and found.key == KEY and [*found.times] == KNOWN


def test_without_any_time_there_is_no_prior() -> None:
    assert prior(KEY) is None
    assert remembered.save(PassTimes(KEY, []))
    assert prior(KEY) is None


def test_of_each_way_two_passes_are_measured() -> None:
    assert {place[:2] for place in anchors(KNOWN)} == {
        (ENGINE, 64), (ENGINE, 1024), (DECODE, 8), (DECODE, 64),
    }  # fmt: skip


WAITING = [
    PassTime(mode, size, 100, us, False, 0.97 * us)
    for mode, size, us in (
        (ENGINE, 16, 90_000.0), (ENGINE, 32, 100_000.0), (PassMode.EAGER, 64, 300_000.0),
        (PassMode.EAGER, 128, 310_000.0), (PassMode.EAGER, 256, 320_000.0),
    )
]  # fmt: skip


def _times(time: PassTime, factor: float) -> PassTime:
    return replace(time, pass_us=factor * time.pass_us, host_us=factor * (time.host_us or 0.0))


NEARLY = PassTime(ENGINE, 48, 100, 130_000.0, False, 100_000.0)


def test_of_what_waits_for_the_host_three_passes_are_measured_and_the_gpus_hardly_wait() -> None:
    known = [*KNOWN, *WAITING, NEARLY]

    assert {place[:2] for place in anchors(known)} == {
        (ENGINE, 64), (ENGINE, 1024), (DECODE, 8), (DECODE, 64),
        (ENGINE, 16), (ENGINE, 32), (PassMode.EAGER, 64),
    }  # fmt: skip


def test_of_a_way_that_nearly_waits_those_are_measured_that_wait_least() -> None:
    known = [
        PassTime(PassMode.EAGER, size, 100, us, False, 100_000.0)
        for size, us in ((2048, 120_000.0), (4096, 115_000.0), (8192, 190_000.0), (1024, 150_000.0))
    ]
    assert {place[1] for place in anchors(known)} == {1024, 8192}


def test_another_host_changes_what_waits_for_it_alone() -> None:
    known = [*KNOWN, *WAITING, NEARLY]
    places = anchors(known)
    slower = iter((1.4, 1.5, 1.9))
    measured = [
        _times(time, next(slower)) if time in WAITING else time
        for time in known if place_of(time) in places
    ]  # fmt: skip

    times = rescaled(known, measured)

    assert times is not None
    found = {place_of(time): time for time in times}
    assert [found[place_of(time)].pass_us for time in KNOWN] == [time.pass_us for time in KNOWN]
    for time in WAITING:
        assert found[place_of(time)].pass_us == pytest.approx(1.5 * time.pass_us)
    # Its launches take longer than the GPU does, by now.
    assert found[place_of(NEARLY)].pass_us == pytest.approx(1.5 * 100_000.0)


def test_launches_that_take_any_time_are_measured_anew() -> None:
    known = [*KNOWN, *WAITING]
    places = anchors(known)
    measured = [time for time in known if place_of(time) in places]
    at = measured.index(WAITING[0])
    measured[at] = replace(WAITING[0], pass_us=2.5 * WAITING[0].pass_us)

    assert rescaled(known, measured) is None


def test_times_that_hold_are_scaled_and_those_measured_here_taken() -> None:
    measured = _here(KNOWN, engine=1.2, decode_graph=0.9)
    times = rescaled(KNOWN, measured)

    assert times is not None and len(times) == len(KNOWN)
    for time, known in zip(times, KNOWN, strict=True):
        factor = 1.2 if known.mode is ENGINE else 0.9
        assert time.pass_us == pytest.approx(factor * known.pass_us)
        assert place_of(time) == place_of(known)


def test_times_that_hold_for_some_passes_only_are_measured_anew() -> None:
    """Of a GPU that is slower with few tokens, say."""
    measured = _here(KNOWN, engine=1.0, decode_graph=1.0)
    measured[0] = replace(measured[0], pass_us=1.3 * measured[0].pass_us)

    assert rescaled(KNOWN, measured) is None


def test_a_way_of_which_nothing_was_measured_here_spoils_it() -> None:
    measured = [time for time in _here(KNOWN, engine=1.0, decode_graph=1.0) if time.mode is ENGINE]

    assert rescaled(KNOWN, measured) is None
    assert rescaled([], []) is None
