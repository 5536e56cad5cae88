"""Batches that no user has sent: as the scheduler makes them, and nothing is left of them."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode import made_up as module
from tests.engines.sglang.pass_mode.fakes import Hidden, Speculation, batch, runner
from tests.engines.sglang.wheels import Wheel


def _runner(**changes: Any) -> Any:
    """A runner with a pool of 80,000 slots."""
    made = runner((64, 1024, 4096), (8, 64), **changes)
    made.prefill_cuda_graph_runner.device = "cpu"
    made.prefill_cuda_graph_runner.capture_prepare = lambda size: (batch([0], [size]), "backend")
    made.max_total_num_tokens = 80_000
    made.model_config = SimpleNamespace(context_len=40_000, vocab_size=1000)
    made.req_to_token_pool = SimpleNamespace(
        req_to_token=torch.zeros(70, 40_100, dtype=torch.int32)
    )
    return made


@pytest.mark.parametrize(("prefix", "lens"), [(0, [64]), (100, [8]), (1536, [512, 512, 7])])
def test_a_measured_batch_is_as_the_scheduler_makes_it(prefix: int, lens: list[int]) -> None:
    made = module.prefill(_runner(), [prefix] * len(lens), lens)
    expected = batch([prefix] * len(lens), lens)

    ours = {"input_ids", "out_cache_loc", "num_token_non_padded_cpu"}
    for name, value in vars(expected).items():
        if torch.is_tensor(value) and name not in ours:
            assert torch.equal(getattr(made, name), value.to(getattr(made, name).dtype)), name
        elif name not in ours:
            assert getattr(made, name) == value, name
    assert made.input_ids.shape == (sum(lens),)
    assert made.input_ids.lt(1000).all() and made.input_ids.ge(0).all()
    assert made.num_token_non_padded_cpu == sum(lens)
    assert made.capture_hidden_mode is Hidden.NULL
    # SGLang keeps slot 0 for padding: nobody's keys are overwritten.
    assert not made.out_cache_loc.any()
    assert made.out_cache_loc.shape == (sum(lens),)


def test_a_measured_batch_returns_the_states_that_a_draft_layer_reads() -> None:
    made = module.prefill(_runner(spec_algorithm=Speculation.EAGLE), [0], [64])

    assert made.capture_hidden_mode is Hidden.FULL


def test_each_sequence_has_pages_of_its_own_and_the_table_is_put_back() -> None:
    made = _runner()
    table = made.req_to_token_pool.req_to_token
    with pytest.raises(RuntimeError), module.page_tables(made, [2048, 100, 70]) as slots:
        assert torch.cat(slots).unique().numel() == 2048 + 100 + 70
        assert not any(int(places[0]) % 64 for places in slots)
        for i, places in enumerate(slots):
            assert torch.equal(table[1 + i, : len(places)], places)
        # Page 0 is padding's, and so is row 0.
        assert min(int(places.min()) for places in slots) >= 64
        assert not table[4:].any() and not table[0].any()
        raise RuntimeError("made up")

    assert not table.any()


def test_slots_lie_within_a_small_pool_whatever_is_asked_for() -> None:
    made = _runner()
    made.max_total_num_tokens = 3000
    assert module.slots_for(made, [2048, 600]) and not module.slots_for(made, [2048, 900])
    with module.page_tables(made, [2048] * 4):
        assert int(made.req_to_token_pool.req_to_token.max()) < 3000


def test_new_tokens_are_written_where_they_are_told_to() -> None:
    slots = torch.arange(100, 164)

    assert module.prefill(_runner(), [0], [64], slots).out_cache_loc is slots


def test_no_new_token_counts_as_padding_and_sglangs_own_count_stays() -> None:
    made, count = _runner(), torch.tensor([64])
    captured = batch([0], [64])
    captured.num_token_non_padded = count
    made.prefill_cuda_graph_runner.capture_prepare = lambda size: (captured, "backend")

    assert module.prefill(made, [0], [37]).num_token_non_padded.tolist() == [37]
    assert count.tolist() == [64]


@pytest.mark.parametrize("name", module._READ_DONE)
def test_no_event_of_a_made_up_pass_stands_for_a_served_one(name: str) -> None:
    """SGLang's scheduler waits for the event of the pass that it has launched, if it finds one."""
    made = _runner()
    setattr(made, name, object())
    with pytest.raises(RuntimeError), module.no_events_left(made):
        raise RuntimeError("made up")

    assert getattr(made, name) is None


def test_events_of_passes_are_where_they_are_looked_for(wheel: Wheel) -> None:
    reads = ast.unparse(
        wheel.definition("sglang/srt/managers/scheduler.py", "Scheduler._apply_war_barrier")
    )
    (name,) = [name for name in module._READ_DONE if f"ev = runner.{name}\n" in reads]
    assert f"runner.{name} = None" in reads
