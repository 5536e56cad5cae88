"""Data-parallel ranks choose alike from what they gathered, and take part whatever they have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.pass_mode.dense.graphs import Kind
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks.gathered import Gathered, Said
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering import data_parallel as module
from nsa_tune.engines.sglang.pass_mode.steering.choice import MARGIN
from nsa_tune.engines.sglang.pass_mode.steering.data_parallel import DataParallel
from nsa_tune.engines.sglang.pass_mode.steering.watch import Watch
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from tests.engines.sglang.pass_mode.fakes import (
    Dense,
    Hidden,
    Mode,
    batch,
    original,
    runner,
    times,
)

_ROWS = RowGraphs((8, 64, 256))
ENGINE, DECODE = PassMode.ENGINE, PassMode.DECODE_GRAPH
DENSE, DENSE_MLA = PassMode.DENSE_GRAPH, PassMode.DENSE_MLA_GRAPH
_TIMES = times(
    engine={(128, 4096): 60_000.0, (512, 4096): 90_000.0, (512, 65536): 95_000.0},
    eager={(128, 4096): 170_000.0, (512, 4096): 180_000.0, (512, 65536): 200_000.0},
    decode_graph={
        (8, 4096): 20_000.0, (64, 4096): 30_000.0, (256, 4096): 80_000.0, (256, 65536): 150_000.0,
    },
)  # fmt: skip


def _steering(**changes: Any) -> DataParallel:
    graphs: dict[PassMode, Any] = {
        DENSE: Dense((512, 2048)), DENSE_MLA: Dense((512, 2048), Kind.MLA),
    }  # fmt: skip
    steering = DataParallel(runner(), 2048, dense=graphs, decode=_ROWS)
    steering.times = _TIMES
    for name, value in changes.items():
        setattr(steering, name, value)
    return steering


def _said(context: int, **changes: Any) -> Said:
    """Of a batch whose sequences the indexer need not select from, whatever its context."""
    return Said(context, **{"short": True, **changes})


def _gathered(
    tokens: list[int], *said: Said, prefill: bool = True, graph: bool = False
) -> Gathered:
    every = said or tuple(_said(100 if count else 0) for count in tokens)
    return Gathered(tokens, every, prefill=prefill, graph=graph)


@pytest.mark.parametrize(
    ("gathered", "expected"),
    [
        (_gathered([50, 3]), DECODE),
        (_gathered([50, 0]), DECODE),
        (_gathered([50, 40], graph=True), DECODE),
        (_gathered([200, 100], graph=True), DECODE),
        # Behind a long prefix rows read it again and again, and a prefill does not.
        (_gathered([200, 100], _said(60_000), _said(10), graph=True), ENGINE),
        (_gathered([200, 100], _said(10), _said(60_000), graph=True), ENGINE),
        # More rows than the largest graph has, a context that was not measured, a way that lost.
        (_gathered([300, 3]), ENGINE),
        (_gathered([50, 3], _said(10), _said(90_000)), ENGINE),
        (_gathered([50, 3], _said(10), _said(10, lost=frozenset({DECODE}))), ENGINE),
    ],
)  # fmt: skip
def test_the_slowest_rank_decides(gathered: Gathered, expected: PassMode) -> None:
    assert _steering().fastest(gathered) is expected


@pytest.mark.parametrize(("more_us", "expected"), [(-10, DECODE), (10, ENGINE)])
def test_another_way_must_be_faster_by_the_margin(more_us: float, expected: PassMode) -> None:
    measured = times(
        engine={(128, 4096): 60_000.0},
        decode_graph={(64, 4096): 60_000.0 * (1 - MARGIN) + more_us},
    )

    assert _steering(times=measured).fastest(_gathered([50, 40], graph=True)) is expected


@pytest.mark.parametrize(
    ("tokens", "graph", "eager_us", "expected_us"),
    [
        ([100, 28], True, 50_000.0, 90_000.0),
        # Where a rank is idle releases differ: the shorter time counts.
        ([100, 0], True, 50_000.0, 50_000.0),
        ([100, 0], True, 170_000.0, 90_000.0),
        ([100, 28], False, 170_000.0, 170_000.0),
    ],
)
def test_a_step_takes_sglang_what_its_way_was_measured_to_take(
    tokens: list[int], graph: bool, eager_us: float, expected_us: float
) -> None:
    eager = {(size, 4096): eager_us for size in (8, 128)}
    steering = _steering(times=times(engine={(128, 4096): 90_000.0}, eager=eager))

    found = steering._engine_us(_gathered(tokens, graph=graph))

    assert found == pytest.approx(expected_us)


def test_an_eager_step_counts_the_mean_of_what_ranks_have() -> None:
    eager = {(64, 4096): 100_000.0, (128, 4096): 200_000.0}
    steering = _steering(times=times(eager=eager))

    assert steering._engine_us(_gathered([100, 27])) == pytest.approx(100_000.0)


def test_rows_take_the_same_time_whether_keys_are_selected_or_not() -> None:
    selecting = PassTime(ENGINE, 128, 4096, 60_000.0, selects=True)
    steering = _steering(times=PassTimes({}, [selecting, PassTime(DECODE, 64, 4096, 30_000.0)]))
    long = Said(3000)

    assert steering.fastest(_gathered([50, 40], long, long, graph=True)) is DECODE


_TURN = Said(300, 4, prefill=True, short=True)
_PROMPT = replace(_TURN, fresh=True)
_SHORTS = times(
    engine={(512, 4096): 90_000.0, (2048, 4096): 120_000.0},
    eager={(64, 4096): 170_000.0, (2048, 4096): 170_000.0},
    dense_graph={(512, 1024): 40_000.0, (2048, 1024): 60_000.0},
    dense_mla_graph={(512, 1024): 50_000.0, (2048, 1024): 80_000.0},
    decode_graph={(256, 4096): 45_000.0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "said", "expected"),
    [
        ([1500, 400], (_PROMPT, _PROMPT), DENSE),
        ([1500, 400], (_PROMPT, _TURN), DENSE_MLA),
        ([200, 150], (_PROMPT, _PROMPT), DENSE),
        ([200, 150], (_PROMPT, _TURN), DECODE),
        # One sequence is too long, one rank decodes or has nothing, or too many sequences.
        ([1500, 400], (_PROMPT, replace(_TURN, short=False)), ENGINE),
        ([1500, 400], (_PROMPT, replace(_TURN, prefill=False)), ENGINE),
        ([1500, 0], (_PROMPT, Said()), ENGINE),
        ([1500, 400], (_PROMPT, replace(_PROMPT, sequences=400)), ENGINE),
        ([1500, 400], (_PROMPT, replace(_TURN, lost=frozenset({DENSE_MLA}))), ENGINE),
        ([3000, 400], (_PROMPT, _PROMPT), ENGINE),
    ],
)
def test_dense_graphs_run_where_all_ranks_have_short_prompts(
    tokens: list[int], said: tuple[Said, ...], expected: PassMode
) -> None:
    steering = _steering(times=_SHORTS)

    assert steering.fastest(_gathered(tokens, *said, graph=True)) is expected
    # Without a vote for the graph there is none whose place they could take.
    assert steering.fastest(_gathered(tokens, *said)) in (ENGINE, DECODE)


def test_an_engine_that_only_prefills_has_dense_graphs_alone() -> None:
    graphs: dict[PassMode, Any] = {DENSE: Dense((512, 2048))}
    steering = DataParallel(runner(decode_cuda_graph_runner=None), 2048, dense=graphs, decode=None)
    steering.times = _SHORTS

    assert steering.fastest(_gathered([200, 150], _PROMPT, _TURN, graph=True)) is ENGINE
    assert steering.fastest(_gathered([200, 150], _PROMPT, _PROMPT, graph=True)) is DENSE


def test_a_dense_pass_tells_the_graphs_backend() -> None:
    steering = _steering(times=_SHORTS)
    made = runner()
    steering._graphs = made.prefill_cuda_graph_runner
    told: list[Any] = []

    def notes(runner: Any, forward_batch: Any, *rest: Any) -> None:
        told.append(dict(vars(steering._graphs.backend)))

    given_batch = batch([0], [1500])
    given_batch.original_global_num_tokens_cpu = _gathered(
        [1500, 400], _PROMPT, _PROMPT, graph=True
    )
    steering.forward(Forward(notes, made, given_batch, (None,)))

    assert told == [{"_nsa_tune_dense": steering.dense[DENSE]}]
    assert not vars(steering._graphs.backend)


def test_a_rank_that_selects_keys_is_estimated_by_passes_that_did() -> None:
    measured = [
        PassTime(ENGINE, 512, 4096, 90_000.0),
        PassTime(ENGINE, 512, 4096, 40_000.0, selects=True),
        PassTime(DECODE, 256, 4096, 60_000.0),
    ]
    steering = _steering(times=PassTimes({"gpu": "made up"}, measured))
    both = [_said(100), _said(100)]

    assert steering.fastest(_gathered([200, 150], *both, graph=True)) is DECODE
    selecting = [_said(100, short=False)] * 2
    assert steering.fastest(_gathered([200, 150], *selecting, graph=True)) is ENGINE


def test_an_idle_rank_keeps_nobody_from_a_graph_that_is_as_fast() -> None:
    """Some releases then run without a graph, others do not."""
    quick = times(engine={(128, 4096): 30_000.0}, eager={(128, 4096): 170_000.0},
                  decode_graph={(64, 4096): 30_000.0})  # fmt: skip
    steering = _steering(times=quick)

    assert steering.fastest(_gathered([50, 0], graph=True)) is ENGINE
    assert steering.fastest(_gathered([50, 0])) is DECODE


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 80_000)), min_size=2, max_size=8)
    .filter(lambda ranks: any(tokens for tokens, _ in ranks)),
    st.booleans(),
)  # fmt: skip
def test_every_rank_decides_alike(ranks: list[tuple[int, int]], graph: bool) -> None:
    """Each from its own copy of what was gathered, and with a past of its own."""
    ways = set()
    for rank in range(len(ranks)):
        steering = _steering()
        steering.last = PassMode.DECODE_GRAPH if rank % 2 else PassMode.ENGINE
        said = tuple(_said(context if tokens else 0) for tokens, context in ranks)
        ways.add(steering.fastest(_gathered([tokens for tokens, _ in ranks], *said, graph=graph)))

    assert len(ways) == 1


def _scheduled(mode: Mode, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "forward_mode": mode, "prefix_lens": [500, 0], "extend_lens": [20, 30],
        "seq_lens_cpu": torch.tensor([1000, 3000]), "return_logprob": False,
        "return_hidden_states": False, "input_embeds": None, "replace_embeds": None,
        "multimodal_inputs": [None, None], "spec_info": None, "dllm_config": None,
        "encoder_lens": None,
    }  # fmt: skip
    unknown = changes.keys() - fields.keys()
    assert not unknown
    return SimpleNamespace(**{**fields, **changes})


def test_a_rank_says_what_its_batch_takes() -> None:
    steering = _steering()
    pairs = 500 * 20 + 20 * 21 // 2 + 30 * 31 // 2

    assert steering.says(_scheduled(Mode.EXTEND)) == Said(
        -(-pairs // 50), 2, prefill=True, short=True
    )
    fresh = _scheduled(Mode.EXTEND, prefix_lens=[0, 0])
    assert steering.says(fresh) == Said(14, 2, prefill=True, short=True, fresh=True)
    long = _scheduled(Mode.EXTEND, prefix_lens=[2048, 0])
    assert steering.says(long) == Said(833, 2, prefill=True)
    assert steering.says(_scheduled(Mode.DECODE)) == Said(2000, 2)
    odd = _scheduled(Mode.DECODE, seq_lens_cpu=torch.tensor([1000, 3001]))
    assert steering.says(odd) == Said(2001, 2)
    few = _scheduled(Mode.DECODE, seq_lens_cpu=torch.tensor([1000, 2048]))
    assert steering.says(few) == Said(1524, 2, short=True)
    assert steering.says(_scheduled(Mode.IDLE)) == Said()
    assert steering.says(None) == Said()


@pytest.mark.parametrize(
    "changes",
    [
        {"return_logprob": True},
        {"return_hidden_states": True},
        {"input_embeds": "some"},
        {"replace_embeds": "some"},
        {"multimodal_inputs": [None, "an image"]},
        {"spec_info": "drafts"},
        {"dllm_config": "diffusion"},
        {"encoder_lens": "some"},
        {"extend_lens": [20, 0]},
        {"extend_lens": torch.tensor([20, 30])},
    ],
)
def test_a_batch_that_cannot_be_rows_says_nothing(changes: dict[str, Any]) -> None:
    assert _steering().says(_scheduled(Mode.EXTEND, **changes)) is None


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE])
def test_more_sequences_than_can_be_told_say_nothing(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SEQUENCES", 2)
    assert _steering().says(_scheduled(mode)) is not None
    monkeypatch.setattr(module, "MOST_SEQUENCES", 1)
    assert _steering().says(_scheduled(mode)) is None


def test_a_mixed_batch_and_one_without_lengths_say_nothing() -> None:
    assert _steering().says(_scheduled(Mode.MIXED)) is None
    assert _steering().says(_scheduled(Mode.DECODE, seq_lens_cpu=None)) is None


def test_a_rank_says_nothing_before_times_and_while_it_is_paused_or_loads_a_prefix() -> None:
    assert _steering(times=None).says(None) is None
    switch.pause()
    try:
        assert _steering().says(None) is None
    finally:
        switch.resume()
    pool = SimpleNamespace(layer_transfer_counter=1)
    loading = DataParallel(runner(token_to_kv_pool=pool), 2048, dense={}, decode=_ROWS)
    loading.times = _TIMES
    assert loading.says(None) is None


def test_a_rank_on_which_rows_lose_says_so() -> None:
    watch = Watch(lambda: None)
    watch.found = frozenset({DECODE})

    assert _steering(watch=watch).says(None) == Said(lost=frozenset({DECODE}))


def test_that_rows_lose_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Although other passes go on to be timed."""
    watch = Watch(_Tick)
    watch.found = frozenset({DECODE})
    steering = _steering(watch=watch)
    with caplog.at_level("WARNING"):
        for _ in range(50):
            start = watch.begin()
            if start is not None:
                watch.end(start, ENGINE, 1000.0)
            steering.says(None)

    assert caplog.text.count("is given up") == 1


class _Tick:
    """An event; each is a little further from the last."""

    count = 0

    def record(self) -> None:
        _Tick.count += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return float(_Tick.count)


def _pass(forward_batch: Any, gathered: Any) -> tuple[list[Any], Any, DataParallel]:
    forward_batch.original_global_num_tokens_cpu = gathered
    forward_batch.is_extend_in_batch = True
    seen: list[Any] = []
    steering = _steering()
    output = steering.forward(Forward(original(seen), runner(), forward_batch, (None,)))
    return seen, output.logits_output.next_token_logits, steering


def test_a_prefill_takes_part_with_its_tokens_as_rows() -> None:
    given_batch = batch([500, 0], [20, 30])
    (one,), logits, steering = _pass(given_batch, _gathered([50, 3]))

    assert one.forward_mode is Mode.DECODE
    assert one.batch_size == 50
    assert one.can_run_dp_cuda_graph
    assert not one.is_extend_in_batch
    assert logits[:, 0].tolist() == given_batch.input_ids[[19, 49]].tolist()
    assert steering.last is DECODE
    assert given_batch.forward_mode is Mode.EXTEND


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.IDLE])
def test_other_ranks_take_part_with_what_they_have(mode: Mode) -> None:
    given_batch = batch([500, 0], [1, 1])
    given_batch.forward_mode = mode
    (one,), _, steering = _pass(given_batch, _gathered([2, 50]))

    assert one.forward_mode is mode
    assert one.batch_size == 2
    assert one.can_run_dp_cuda_graph
    assert not given_batch.can_run_dp_cuda_graph
    assert steering.last is DECODE


@pytest.mark.parametrize(
    "gathered", [None, [50, 3], _gathered([300, 3]), _gathered([2, 3], prefill=False)]
)
def test_without_an_agreement_a_pass_is_sglangs_own(gathered: Any) -> None:
    given_batch = batch([500, 0], [20, 30], capture_hidden_mode=Hidden.NULL)
    (one,), _, steering = _pass(given_batch, gathered)

    assert one is given_batch
    assert steering.last is ENGINE


class _Watch:
    """Every second pass is timed."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended: list[tuple[PassMode, float]] = []

    def begin(self) -> object:
        self.begun += 1
        return self if self.begun % 2 else None

    def end(self, start: object, mode: PassMode, engine_us: float) -> None:
        self.ended.append((mode, engine_us))


def test_steps_with_a_prefill_are_timed_against_sglangs_own() -> None:
    watch = _Watch()
    steering = _steering(watch=watch)
    for gathered in (_gathered([50, 3]), _gathered([50, 3]), _gathered([2, 3], prefill=False)):
        given_batch = batch([500, 0], [20, 30])
        given_batch.original_global_num_tokens_cpu = gathered
        steering.forward(Forward(original([]), runner(), given_batch, (None,)))

    assert watch.begun == 2
    assert [mode for mode, _ in watch.ended] == [DECODE]
    assert [took for _, took in watch.ended] == pytest.approx([170_000.0])


def test_a_pause_between_saying_and_running_changes_nothing() -> None:
    switch.pause()
    try:
        _, _, steering = _pass(batch([500, 0], [20, 30]), _gathered([50, 3]))
    finally:
        switch.resume()

    assert steering.last is DECODE


def test_a_measured_pass_is_the_one_that_is_asked_for() -> None:
    seen: list[Any] = []
    steering = _steering(forced=PassMode.EAGER)
    given_batch = batch([0], [100], can_run_dp_breakable_cuda_graph=True)
    steering.forward(Forward(original(seen), runner(), given_batch, (None,)))
    steering.forced = PassMode.ENGINE
    steering.forward(Forward(original(seen), runner(), given_batch, (None,)))

    assert [one.can_run_dp_breakable_cuda_graph for one in seen] == [False, True]
