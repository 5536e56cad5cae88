"""Which calls get nsa-tune's kernel: where it is right, faster at all sizes around, and allowed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang import last_start, switch
from nsa_tune.engines.sglang.eligible import Engine
from nsa_tune.engines.sglang.kernels import swap as module
from nsa_tune.engines.sglang.kernels.swap import Call, KernelSwap, Timing, Wins, relative_error
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import Part

OUTPUT = torch.tensor([3.0, 4.0])


def _wins(*timings: Timing, beyond: bool = True) -> Wins:
    return Wins(timings, 0.1, beyond=beyond)


def test_sizes_between_two_that_are_faster_get_the_kernel() -> None:
    wins = _wins(Timing((4,), 30.0, 20.0), Timing((8,), 33.0, 25.0), Timing((16,), 36.0, 35.5))

    asked = (3, 4, 4, 6, 6, 8, 9, 9, 16, 99)  # layers of a pass ask alike
    assert [size for size in asked if (size,) in wins] == [4, 4, 6, 6, 8]
    assert len(wins.faster) == 2


@pytest.mark.parametrize("beyond", [True, False])
def test_larger_calls_than_were_measured_go_by_the_largest_if_at_all(*, beyond: bool) -> None:
    assert ((99,) in _wins(Timing((4,), 30.0, 20.0), beyond=beyond)) == beyond


def test_all_measured_sizes_around_must_be_faster_in_both_dimensions() -> None:
    wins = _wins(
        Timing((64, 3000), 9.0, 5.0), Timing((64, 9000), 9.0, 5.0),
        Timing((128, 3000), 9.0, 5.0), Timing((128, 9000), 9.0, 9.0),
    )  # fmt: skip

    assert (64, 5000) in wins and (100, 3000) in wins and (128, 10) in wins
    assert (100, 5000) not in wins and (500, 9000) not in wins
    assert (63, 3000) not in wins, "fewer rows than were measured"


def test_nothing_measured_is_no_win() -> None:
    assert (1,) not in _wins()


@pytest.mark.parametrize(
    ("swapped_us", "more_us", "faster"),
    [(89, 0, True), (91, 0, False), (80, 9, True), (80, 11, False), (91, -9, False)],
)
def test_what_is_launched_later_counts_and_what_is_launched_sooner_does_not(
    swapped_us: float, more_us: float, *, faster: bool
) -> None:
    assert Timing((1,), 100.0, swapped_us, more_us).is_win(0.1) == faster


@pytest.mark.parametrize(
    ("swapped", "error"),
    [
        (OUTPUT.clone(), 0.0), (OUTPUT * 1.5, 0.5), (torch.tensor([0.0, 4.0]), 0.6),
        (OUTPUT.double(), 1e-30), (OUTPUT[None], 0.0),
    ],
)  # fmt: skip
def test_outputs_differ_by_the_norm_of_their_difference(
    swapped: torch.Tensor, error: float
) -> None:
    assert relative_error(OUTPUT, swapped) == pytest.approx(error)


# --- an engine's start


def _swap(calls: Callable[[Engine], Iterator[Call]], **changes: Any) -> KernelSwap:
    return KernelSwap("made_up", Part.COPIES, "copies", ("rows",), calls, **changes)


def _calls(swapped: torch.Tensor | None = OUTPUT) -> Callable[[Engine], Iterator[Call]]:
    return lambda engine: iter([Call((64,), lambda: OUTPUT, lambda: swapped)])


RUNNER: Any = SimpleNamespace(
    is_draft_worker=False, attn_backend="a backend",
    tp_group=SimpleNamespace(rank_in_group=0, world_size=1),
)  # fmt: skip


@pytest.fixture(autouse=True)
def twice_as_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """nsa-tune's kernel takes half the time, and nothing speaks against it."""
    monkeypatch.setattr(module, "why_not", lambda part, engine: None)
    monkeypatch.setattr(module, "timed_us", lambda ways: (20.0, 10.0))
    monkeypatch.setattr(module, "replayed_us", lambda ways: (20.0, 10.0))
    monkeypatch.setattr(module, "more_launched_us", lambda engine, swapped: 1.0)
    yield
    switch.resume()


def test_a_start_measures_and_says_what_comes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    swap = _swap(_calls())

    swap.start(RUNNER)

    said = "nsa-tune's kernel copies: it is faster at 1 of 1 measured sizes, 20 to 10 us at 64 rows"
    assert said in caplog.text and said in (last_start.kept("made_up") or "")
    assert swap.takes((64,)) and not swap.takes((63,))


@pytest.mark.parametrize(
    ("silent", "takes"), [("", True), ("made_up", False), ("made_up, measured", False)]
)
def test_a_kernel_runs_on_all_ranks_by_rank_0s_times_or_on_none(
    silent: str, monkeypatch: pytest.MonkeyPatch, *, takes: bool
) -> None:
    monkeypatch.setattr(Ranks, "agree", lambda ranks, topic, value: topic != silent)
    monkeypatch.setattr(Ranks, "from_first", lambda ranks, value: (Timing((8,), 9.0, 1.0),))
    swap = _swap(_calls())

    swap.start(RUNNER)

    assert swap.takes((8,)) == takes


def test_a_kernel_that_takes_the_host_longer_than_it_saves_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "more_launched_us", lambda engine, swapped: 10.0)
    eager, captured = _swap(_calls()), _swap(_calls(), captured=True)

    eager.start(RUNNER)
    captured.start(RUNNER)

    assert not eager.takes((64,)) and captured.takes((64,))
    assert "SGLang's kernel copies: it is as fast at all measured sizes" in caplog.text


@pytest.mark.parametrize(
    ("swapped", "tolerance", "error"),
    [
        (OUTPUT * 1.001, 0.0, "0.001 away"), (OUTPUT * 1.1, 0.02, "0.1 away"),
        (OUTPUT * float("nan"), 0.02, "nan away"), (None, 0.0, "cannot take a call"),
    ],
)  # fmt: skip
def test_a_kernel_that_computes_something_else_is_never_taken(
    swapped: torch.Tensor | None, tolerance: float, error: str
) -> None:
    swap = _swap(_calls(swapped), tolerance=tolerance)

    with pytest.raises(RuntimeError, match=error):
        swap.start(RUNNER)

    assert not swap.takes((64,))
    assert "failed" in (last_start.kept("made_up") or "")


def test_within_the_tolerance_it_is_taken() -> None:
    swap = _swap(_calls(OUTPUT * 1.001), tolerance=0.02)
    swap.start(RUNNER)

    assert swap.takes((64,))


def test_what_is_compared_may_be_something_else_than_what_is_timed() -> None:
    call = Call((64,), lambda: OUTPUT, lambda: -OUTPUT, compared=lambda: OUTPUT)

    assert [timing.size for timing in _swap(_calls()).timings([call])] == [(64,)]


def test_another_start_forgets_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    swap = _swap(_calls())
    swap.start(RUNNER)
    monkeypatch.setattr(module, "why_not", lambda part, engine: "HiSparse")

    swap.start(RUNNER)

    assert not swap.takes((64,))
    assert "SGLang's kernel copies: HiSparse" in caplog.text


def test_where_sglang_never_calls_it_nothing_is_measured() -> None:
    swap = _swap(_calls(), applies=lambda engine: False)
    swap.start(RUNNER)

    assert swap.wins is None


def test_a_draft_worker_changes_nothing() -> None:
    swap = _swap(_calls())
    swap.start(RUNNER)
    swap.start(SimpleNamespace(is_draft_worker=True))

    assert swap.takes((64,))


def test_only_the_owners_calls_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = _swap(_calls(), owner_of=lambda engine: engine.backend)
    swap.start(RUNNER)

    assert swap.takes((64,), RUNNER.attn_backend) and not swap.takes((64,), "another backend")
    switch.pause()
    assert not swap.takes((64,), RUNNER.attn_backend)
    switch.resume()
    monkeypatch.setenv("NSA_TUNE_COPIES", "0")
    assert not swap.takes((64,), RUNNER.attn_backend)


def test_after_an_error_sglangs_kernel_runs_for_good(caplog: pytest.LogCaptureFixture) -> None:
    def fails(rows: int) -> None:
        raise RuntimeError(f"no kernel of {rows} rows")

    swap = _swap(_calls())
    swap.start(RUNNER)

    assert swap.run(fails, 64) is None
    assert "no kernel of 64 rows" in caplog.text
    assert not swap.takes((64,))
