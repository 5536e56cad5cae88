"""Decode graphs as ways to run a prefill: which, for what, and what they return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from tests.engines.sglang.pass_mode.fakes import (
    Hidden,
    Mode,
    Speculation,
    batch,
    original,
    runner,
)

lens = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=5)


def _mtp(width: int = 4) -> RowGraphs:
    return RowGraphs((1, 8, 64), width, verify=True, hidden_states=True)


def test_without_speculation_each_request_has_a_row() -> None:
    found = RowGraphs.of(runner(rows=(64, 8)))

    assert found == RowGraphs((8, 64))
    assert found.sizes == [8, 64]


@pytest.mark.parametrize("mode", [Hidden.FULL, Hidden.NULL])
def test_graphs_that_verify_have_as_many_rows_as_draft_tokens(mode: Hidden) -> None:
    made = runner(rows=(64, 8), spec_algorithm=Speculation.EAGLE)
    made.decode_cuda_graph_runner.captured_req_width = 4
    made.decode_cuda_graph_runner.capture_hidden_mode = mode
    found = RowGraphs.of(made)

    assert found == RowGraphs((8, 64), 4, verify=True, hidden_states=mode is Hidden.FULL)
    assert found.sizes == [32, 256]


@pytest.mark.parametrize(
    ("width", "extend_lens", "rows"),
    [(1, [3, 4], 7), (2, [3, 4], 8), (4, [3, 4], 8), (4, [1, 5], 12), (4, [8], 8)],
)
def test_a_batch_takes_whole_requests(width: int, extend_lens: list[int], rows: int) -> None:
    extend = batch([0] * len(extend_lens), extend_lens)

    assert RowGraphs((8,), width).rows_of(extend) == rows


@pytest.mark.parametrize(
    ("graphs", "hidden", "takes"),
    [
        (_mtp(), Hidden.FULL, True),
        (_mtp(), Hidden.NULL, True),
        (_mtp(), Hidden.LAST, False),
        (RowGraphs((8,), 4, verify=True), Hidden.FULL, False),
        (RowGraphs((8,)), Hidden.FULL, False),
        (RowGraphs((8,)), None, True),
    ],
)
def test_hidden_states_are_returned_where_graphs_have_them(
    graphs: RowGraphs, hidden: Hidden | None, takes: bool
) -> None:
    found = graphs.rows_of(batch([8192], [128], capture_hidden_mode=hidden))

    assert (found is not None) == takes


def _outputs(run: Any, extend: Any) -> tuple[torch.Tensor, torch.Tensor | None, list[Any]]:
    """Logits, hidden states, and the passes that ran."""
    seen: list[Any] = []
    found = run(Forward(original(seen), SimpleNamespace(), extend)).logits_output
    return found.next_token_logits, found.hidden_states, seen


@settings(max_examples=60, deadline=None)
@given(lens, st.integers(1, 4))
def test_verify_passes_return_what_the_prefill_would(
    given_lens: list[tuple[int, int]], width: int
) -> None:
    """Also where the next replay writes over the outputs of the last one."""
    prefix_lens, extend_lens = [one[0] for one in given_lens], [one[1] for one in given_lens]
    extend = batch(prefix_lens, extend_lens, capture_hidden_mode=Hidden.FULL)
    graphs = _mtp(width)
    logits, states, passes = _outputs(graphs.run, extend)
    own_logits, own_states, _ = _outputs(Forward.run, extend)

    assert own_states is not None and states is not None
    assert torch.equal(logits, own_logits)
    assert torch.equal(states, own_states)
    assert {one.forward_mode for one in passes} == {Mode.TARGET_VERIFY}
    assert [one.batch_size for one in passes[:-1]] == [64] * (len(passes) - 1)
    assert graphs.rows_of(extend) == width * sum(one.batch_size for one in passes)


@pytest.mark.parametrize("graphs", [_mtp(), RowGraphs((8,))])
def test_states_that_nobody_asked_for_are_not_returned(graphs: RowGraphs) -> None:
    """As SGLang's own prefill has none then, whatever its decode graphs return."""
    assert _outputs(graphs.run, batch([64, 0], [3, 30]))[1] is None
