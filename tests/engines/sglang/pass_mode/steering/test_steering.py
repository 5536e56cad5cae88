"""Which way a pass runs, and that it returns what SGLang's own would."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.types.profiles import ALL_TOKENS
from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.hooks import around_forward
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.start import STEERING
from nsa_tune.engines.sglang.pass_mode.steering import steering as module
from nsa_tune.engines.sglang.pass_mode.steering.choice import MARGIN
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.whole_pass.dense_graphs import DenseGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind
from nsa_tune.engines.sglang.prefill import ENGINE_KERNEL, MADE_UP
from nsa_tune.engines.sglang.ranks import Ranks
from tests.engines.sglang.pass_mode.fakes import (
    TOPK,
    Alone,
    Dense,
    Hidden,
    Mode,
    Sparse,
    batch,
    original,
    room,
    runner,
    times,
)

SIZES, ROWS = (128, 512, 2048), (8, 64, 256)
ROW_GRAPHS = RowGraphs(ROWS)
ENGINE, EAGER, DECODE = PassMode.ENGINE, PassMode.EAGER, PassMode.DECODE_GRAPH
DENSE, DENSE_MLA = PassMode.DENSE_GRAPH, PassMode.DENSE_MLA_GRAPH
TABLE = PassMode.TABLE_KERNEL
CONTEXTS = (1, 2048, 20000)
MEASURED = times(
    engine={(size, context): 100_000.0 for size in SIZES for context in CONTEXTS},
    table_kernel={(size, context): 100_000.0 for size in SIZES for context in CONTEXTS},
    dense_graph={(size, 2048): 50_000.0 for size in SIZES},
    decode_graph={(rows, context): 30_000.0 for rows in ROWS for context in CONTEXTS},
)


def _dense(*graphs: Any) -> Mapping[PassMode, DenseGraphs]:
    modes = {Kind.MHA: DENSE, Kind.MLA: DENSE_MLA}
    return {modes[one.kind]: one for one in graphs}


def _steering(
    measured: PassTimes | None = MEASURED,
    *,
    dense: Any = None,
    decode: RowGraphs | None = ROW_GRAPHS,
    ranks: Any = None,
    **changes: Any,
) -> Steering:
    made = Steering(
        runner(SIZES, ROWS, **changes),
        TOPK,
        cast("Ranks", ranks or Alone()),
        graphs=_dense(dense or Dense(SIZES)),
        decode=decode,
    )
    made.times = measured
    return made


def _fastest(steered: Steering, prefix_lens: list[int], extend_lens: list[int]) -> PassMode:
    sums = sums_of(prefix_lens, extend_lens)
    assert sums is not None
    return steered.fastest(sums, sums.q_tokens if steered.rows else None)


def _run(steered: Steering, extend: Any) -> tuple[torch.Tensor, list[Any]]:
    """Logits, and the passes that ran."""
    seen: list[Any] = []
    output = steered.forward(Forward(original(seen), SimpleNamespace(), extend, ("pp",)))
    return output.logits_output.next_token_logits, seen


def test_few_tokens_run_as_rows_and_more_densely() -> None:
    steered = _steering()

    assert _fastest(steered, [8192], [128]) is DECODE
    assert _fastest(steered, [0], [100]) is DECODE  # 30 against 50 and 100 ms
    assert _fastest(steered, [0, 0, 0], [400, 400, 400]) is DENSE  # five passes of rows: 150 ms
    assert _fastest(steered, [8192], [1024]) is ENGINE  # four of them: 120 ms


def test_nothing_is_steered_while_prefixes_arrive_layer_by_layer() -> None:
    steered = _steering()
    steered._pool.layer_transfer_counter = object()

    (seen,) = _run(steered, batch([8192], [128]))[1]

    assert seen.forward_mode is Mode.EXTEND


def test_without_times_everything_is_the_engines_by_the_tables_kernel() -> None:
    steered = _steering(None)

    assert _fastest(steered, [8192], [128]) is TABLE
    assert [one.forward_mode for one in _run(steered, batch([8192], [128]))[1]] == [Mode.EXTEND]


def test_what_was_not_measured_is_the_engines_by_the_tables_kernel() -> None:
    steered = _steering()

    assert _fastest(steered, [0], [4096]) is TABLE  # beyond the largest graph
    assert _fastest(steered, [60000], [128]) is TABLE  # beyond the longest context
    only = times(decode_graph={(256, 20000): 1.0})
    assert _fastest(_steering(only), [8192], [128]) is TABLE  # against nothing
    only = times(engine={(128, 20000): 1e5})
    assert _fastest(_steering(only), [8192], [128]) is TABLE  # not compared: it is the same there


def test_the_fastest_of_all_ways_is_taken() -> None:
    measured = times(
        engine={(128, 20000): 1e5}, table_kernel={(128, 20000): 6e4},
        decode_graph={(256, 20000): 7e4},
    )  # fmt: skip

    assert _fastest(_steering(measured), [8192], [128]) is TABLE


def test_the_tables_kernel_once_disabled_leaves_sglangs_own() -> None:
    """Both where it was measured to be faster and where nothing was measured."""
    measured = times(engine={(128, 20000): 1e5}, table_kernel={(128, 20000): 6e4})
    steered = _steering(measured)
    _monitored(steered).disabled = frozenset({TABLE})

    assert _fastest(steered, [8192], [128]) is ENGINE
    assert _fastest(steered, [8192], [4096]) is ENGINE


@pytest.mark.parametrize(
    ("mode", "pass_us", "expected"),
    [
        (TABLE, 120_000.0, ENGINE), (TABLE, 99_010.0, ENGINE), (TABLE, 98_990.0, TABLE),
        (DECODE, 100_000.0, ENGINE), (DECODE, 100_000.0 * (1 - MARGIN) + 10, ENGINE),
        (DECODE, 100_000.0 * (1 - MARGIN) - 10, DECODE), (TABLE, 60_000.0, TABLE),
    ],
)  # fmt: skip
def test_another_way_must_be_faster_by_its_margin(
    mode: PassMode, pass_us: float, expected: PassMode
) -> None:
    """The table's kernel by a percent."""
    own, at = {(128, 20000): 100_000.0}, (256 if mode is DECODE else 128, 20000)
    measured = times(**{"engine": own, "table_kernel": own, mode: {at: pass_us}})

    assert _fastest(_steering(measured), [8192], [128]) is expected


def test_dense_graphs_run_what_has_no_prefix_and_fits() -> None:
    steered = _steering(decode=None)

    assert _fastest(steered, [0], [2048]) is DENSE
    assert _fastest(steered, [0, 0], [1000, 1000]) is DENSE
    assert _fastest(steered, [64], [1000]) is ENGINE
    assert _fastest(steered, [0, 64], [1000, 100]) is ENGINE
    most = room(512)
    assert _fastest(steered, [0] * most, [480 // most] * most) is DENSE
    assert _fastest(steered, [0] * (most + 1), [480 // (most + 1)] * (most + 1)) is ENGINE
    assert _fastest(_steering(decode=None, dense=Dense(())), [0], [2048]) is ENGINE


def test_dense_graphs_run_nothing_longer_than_the_indexer_selects() -> None:
    dense = _dense(Dense((4096,)))
    made = Steering(runner((4096,), ROWS), TOPK, cast("Ranks", Alone()), graphs=dense, decode=None)
    own = {(4096, 4096): 9e4}
    made.times = times(engine=own, table_kernel=own, dense_graph={(4096, 4096): 1e4})

    assert _fastest(made, [0, 0], [TOPK, TOPK]) is DENSE
    assert _fastest(made, [0], [TOPK + 1]) is ENGINE


def test_dense_graphs_run_nothing_that_sglang_runs_eagerly() -> None:
    """It does so where the graph would have more than twice as many tokens."""
    steered = _steering(decode=None)

    assert _fastest(steered, [0, 0], [130, 126]) is DENSE  # 256 of 512
    assert _fastest(steered, [0, 0], [130, 125]) is ENGINE


def test_graphs_of_absorbed_attention_take_a_prefix() -> None:
    steered = _steering(decode=None, dense=Dense(SIZES, Kind.MLA))
    own = {(2048, 2048): 9e4, (128, 2048): 9e4}
    steered.times = times(engine=own, table_kernel=own, dense_mla_graph={(2048, 2048): 1e4})

    assert _fastest(steered, [0, 64], [1000, 1000]) is DENSE_MLA
    assert _fastest(steered, [900], [1148]) is DENSE_MLA
    assert _fastest(steered, [900], [1149]) is ENGINE  # longer than the indexer selects
    assert _fastest(steered, [900, 900], [1148, 3]) is DENSE_MLA


def test_an_eager_pass_is_dense_up_to_what_the_indexer_selects_and_no_further() -> None:
    steered = _steering(decode=None, dense=Dense(()))
    own = {(2048, 2049): 9e4}
    eager = {(1024, 1): 5e4, (2048, 2049): 5e4}
    steered.times = times(engine=own, table_kernel=own, eager=eager)

    assert _fastest(steered, [0], [2048]) is EAGER
    assert _fastest(steered, [1, 0], [2047, 1]) is EAGER
    assert _fastest(steered, [1], [2048]) is ENGINE


@pytest.mark.parametrize(
    ("eager_us", "expected"), [(44_000.0, EAGER), (46_000.0, PassMode.DENSE_GRAPH)]
)
def test_an_eager_pass_must_be_much_faster_than_every_other_way(
    eager_us: float, expected: PassMode
) -> None:
    """Its time is the host's, which has more to do once requests come."""
    steered = _steering(decode=None, dense=Dense((2048,)))
    at = (2048, 2049)
    steered.times = times(
        engine={at: 90_000.0}, table_kernel={at: 90_000.0}, dense_graph={at: 60_000.0},
        eager={at: eager_us},
    )  # fmt: skip

    assert _fastest(steered, [0], [2048]) is expected


def _flags(steered: Steering) -> set[str]:
    """What the hooks further down are told of the pass that runs."""
    owners = (steered._backend, steered._graphs, steered._graphs.backend)
    return {name for one in owners for name in vars(one) if name.startswith("_nsa_tune")}


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        (ENGINE, {ENGINE_KERNEL}),
        (TABLE, set()),
        (EAGER, {"_nsa_tune_eager"}),
        (DENSE, {"_nsa_tune_graphs"}),
        (DECODE, set()),
    ],
)
def test_a_pass_is_marked_while_it_runs_and_not_after_an_error(
    mode: PassMode, flags: set[str]
) -> None:
    steered = _steering()
    steered.forced = mode
    seen: list[set[str]] = []

    def look(runner: Any, extend: Any, *rest: Any) -> Any:
        seen.append(_flags(steered))
        raise RuntimeError("made up")

    with pytest.raises(RuntimeError):
        steered.forward(Forward(look, SimpleNamespace(), batch([0], [2048]), ()))

    assert seen == [flags]
    assert _flags(steered) == set()


def test_an_eager_pass_of_dense_mla_is_expanded() -> None:
    made, seen = runner(SIZES, ROWS), []
    steered = Steering(made, ALL_TOKENS, cast("Ranks", Alone()), graphs={}, decode=None)
    # SGLang does so for another number of draft tokens.
    made.attn_backend = SimpleNamespace()

    def look(runner: Any, extend: Any, *rest: Any) -> None:
        seen.append(vars(made.attn_backend).get("use_mha"))

    for mode in (EAGER, ENGINE):
        steered.forced = mode
        steered.forward(Forward(look, SimpleNamespace(), batch([64], [2048]), ()))

    assert seen == [True, None]


def test_the_engines_kernel_is_kept_where_the_tables_was_measured_to_be_slower() -> None:
    measured = times(engine={(128, 20000): 1e5}, table_kernel={(128, 20000): 2e5})
    steered = _steering(measured)
    seen = []

    def look(runner: Any, extend: Any, *rest: Any) -> None:
        seen.append(_flags(steered))

    for prefix in (8192, 60000):  # measured, and not measured
        steered.forward(Forward(look, SimpleNamespace(), batch([prefix], [128]), ()))

    assert seen == [{ENGINE_KERNEL}, set()]


def test_passes_by_other_kernels_than_the_tables_are_logged_as_well() -> None:
    steered, ways = _steering(), []
    steered._backend._nsa_tune_prefill = SimpleNamespace(
        has_changed=True, note=lambda batch, own, taken: ways.append(taken["pass_mode"])
    )
    for prefix, new in ((8192, 128), (0, 1200), (8192, 1024), (60000, 128)):
        _run(steered, batch([prefix], [new]))

    assert ways == [DECODE, DENSE, ENGINE], "the last is by the table's kernel"
    with steered.forcing(TABLE):
        assert _flags(steered) == {"_nsa_tune_prefill", MADE_UP}


@pytest.mark.parametrize(
    "changes",
    [
        {"return_logprob": True},
        {"capture_hidden_mode": Hidden.LAST},
        {"return_pooled_hidden_states": True},
        {"input_embeds": torch.zeros(1)},
        {"replace_embeds": torch.zeros(1)},
        {"mm_inputs": [None, object()]},
        {"spec_info": object()},
        {"global_num_tokens_cpu": [128, 128]},
        {"multi_item_delimiter_indices": [torch.zeros(1)]},
        {"rids_int": torch.zeros(1)},
        {"forward_mode": Mode.DECODE},
        {"forward_mode": Mode.MIXED},
    ],
)
def test_rows_run_prefills_that_ask_for_no_more_than_last_tokens(changes: dict[str, Any]) -> None:
    extend = batch([8192], [128], **changes)

    assert _run(_steering(), extend)[1] == [extend]


@pytest.mark.parametrize("name", ["input_embeds", "replace_embeds"])
def test_what_sglang_runs_without_a_graph_counts_for_no_way(name: str) -> None:
    """Else a way would be given up for passes that it did not run."""
    steered = _steering(decode=None)
    monitor = _monitored(steered)
    assert _run(steered, batch([0], [2048]))[1]
    assert [mode for mode, _ in monitor.ended] == [DENSE]

    (seen,) = _run(steered, batch([0], [2048], **{name: torch.zeros(2048, 8)}))[1]
    assert seen.forward_mode is Mode.EXTEND
    assert steered.last is ENGINE
    assert len(monitor.ended) == 1


def test_images_that_are_not_there_ask_for_nothing() -> None:
    passes = _run(_steering(), batch([8192], [128], mm_inputs=[None]))[1]

    assert [one.forward_mode for one in passes] == [Mode.DECODE]


def test_a_sequence_without_tokens_runs_as_sglang_has_it() -> None:
    extend = batch([8192, 0], [128, 0])

    assert _run(_steering(), extend)[1] == [extend]


def test_lengths_that_are_no_list_are_left_to_sglang() -> None:
    extend = batch([8192], [128])
    extend.extend_seq_lens_cpu = torch.tensor([128])

    assert _steering()._sums(extend) is None


def test_a_dense_graph_gets_no_sequence_without_tokens() -> None:
    """It would take the pages of the first one for those of the second."""
    measured = times(engine={(128, 20000): 1e5}, dense_mla_graph={(128, 20000): 1e4})
    steered = _steering(measured, dense=Dense([128], Kind.MLA), decode=None)

    def way(prefix_lens: list[int], extend_lens: list[int]) -> PassMode:
        steered.forward(
            Forward(original([]), SimpleNamespace(), batch(prefix_lens, extend_lens), ())
        )
        return steered.last

    assert way([64, 128], [64, 64]) is DENSE_MLA
    assert way([64, 64, 128], [0, 64, 64]) is ENGINE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=5))
def test_each_way_returns_the_logits_that_sglang_would(lens: list[tuple[int, int]]) -> None:
    prefix_lens, extend_lens = [one[0] for one in lens], [one[1] for one in lens]
    expected = _run(_steering(None), batch(prefix_lens, extend_lens))[0]

    for mode in PassMode:
        steered = _steering()
        steered.forced = mode
        found, passes = _run(steered, batch(prefix_lens, extend_lens))
        assert torch.equal(found, expected)
        if mode is DECODE:
            assert [one.batch_size for one in passes[:-1]] == [256] * (len(passes) - 1)
            assert sum(one.batch_size for one in passes) == sum(extend_lens)
        else:
            assert len(passes) == 1


@pytest.mark.parametrize(
    ("extend_lens", "mode"), [([64], DECODE), ([1] * 16, DECODE), ([1] * 17, ENGINE)]
)
def test_what_fills_up_verify_requests_counts(extend_lens: list[int], mode: PassMode) -> None:
    """Graphs of 32, 64 and 256 rows, four a request."""
    rows = {(32, 9000): 10.0, (64, 9000): 20.0, (256, 9000): 50.0}
    own = {(128, 9000): 40.0}
    measured = times(engine=own, table_kernel=own, decode_graph=rows)
    graphs = RowGraphs((8, 16, 64), 4, verify=True, hidden_states=True)
    steered = _steering(measured, decode=graphs)
    prefix_lens = [4000] * len(extend_lens)
    extend = batch(prefix_lens, extend_lens, capture_hidden_mode=Hidden.FULL)
    _run(steered, extend)

    assert steered.last is mode


def test_sparse_graphs_run_what_selects_keys_as_far_as_there_is_room() -> None:
    sparse = Sparse(SIZES, most_keys=30_000)
    made = Steering(
        runner(SIZES, ROWS), TOPK, cast("Ranks", Alone()),
        graphs=cast("Any", {PassMode.SPARSE_GRAPH: sparse}), decode=None,
    )  # fmt: skip
    own = {(size, context): 100_000.0 for size in SIZES for context in CONTEXTS}
    graph = {(size, context): 60_000.0 for size in SIZES for context in CONTEXTS}
    made.times = times(engine=own, table_kernel=own, sparse_graph=graph)

    assert _fastest(made, [16384], [300]) is PassMode.SPARSE_GRAPH
    assert _fastest(made, [16384, 0, 700], [300, 40, 9]) is PassMode.SPARSE_GRAPH
    assert _fastest(made, [16384, 16384], [300, 300]) is ENGINE


def test_a_dense_pass_names_its_graphs() -> None:
    """And has SGLang pad the batch to their sizes."""
    steered = _steering(decode=None)
    seen, own = [], steered._graphs.capture_num_tokens

    def look(runner: Any, extend: Any, *rest: Any) -> None:
        whole = steered._graphs.backend._nsa_tune_graphs
        seen.append((whole, steered._graphs.capture_num_tokens))

    steered.forward(Forward(look, SimpleNamespace(), batch([0], [2048]), ()))

    assert seen == [(steered.graphs[DENSE], steered.graphs[DENSE].sizes)]
    assert steered._graphs.capture_num_tokens is own


class _Watch:
    """Passes that were timed, and what was found to lose."""

    def __init__(self) -> None:
        self.disabled: frozenset[PassMode] = frozenset()
        self.losing: frozenset[PassMode] = frozenset()
        self.ended: list[tuple[PassMode, float]] = []

    def begin(self) -> object:
        return self

    def end(self, start: object, mode: PassMode, engine_us: float) -> None:
        self.ended.append((mode, engine_us))

    def report(self) -> dict[str, object]:
        return {}


def _monitored(steered: Steering) -> _Watch:
    monitor = _Watch()
    steered.monitor = monitor  # type: ignore[assignment]
    return monitor


def test_a_way_that_was_disabled_is_not_taken() -> None:
    steered = _steering()
    monitor = _monitored(steered)
    assert _fastest(steered, [0], [100]) is DECODE

    monitor.disabled = frozenset({DECODE})
    assert _fastest(steered, [0], [100]) is DENSE
    monitor.disabled = frozenset({DECODE, DENSE})
    assert _fastest(steered, [0], [100]) is ENGINE


def test_passes_are_timed_against_the_engines_own() -> None:
    steered = _steering()
    monitor = _monitored(steered)
    _run(steered, batch([8192], [128]))
    _run(steered, batch([8192], [1024]))
    _run(steered, batch([8192], [128], forward_mode=Mode.DECODE))

    assert [mode for mode, _ in monitor.ended] == [DECODE, ENGINE]
    assert [took for _, took in monitor.ended] == pytest.approx([100_000.0, 100_000.0])


@pytest.mark.parametrize(("changes", "mode"), [(True, TABLE), (False, ENGINE)])
def test_a_pass_that_the_table_left_alone_counts_as_sglangs_own(
    changes: bool, mode: PassMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells of drift. It is not held against the table's kernel, which did not run."""
    monkeypatch.setattr(module, "changed", lambda backend: changes)
    steered = _steering(times(engine={(128, 20000): 1e5}))
    monitor = _monitored(steered)
    _run(steered, batch([8192], [128]))

    assert steered.last is TABLE
    assert [one for one, _ in monitor.ended] == [mode]


class _Follower(Alone):
    """A rank that is told what rank 0 has found."""

    rank, count = 1, 2
    told: frozenset[PassMode] = frozenset()

    def from_first(self, value: Any) -> Any:
        return self.told


def test_ranks_give_up_what_rank_0_has_found_and_at_the_same_pass() -> None:
    """What this rank alone has seen does not count."""
    ranks = _Follower()
    steered = _steering(ranks=ranks)
    monitor = _monitored(steered)
    monitor.losing = frozenset({DENSE})

    def served(count: int) -> list[Mode]:
        return [_run(steered, batch([8192], [128]))[1][0].forward_mode for _ in range(count)]

    ranks.told = frozenset({DECODE})
    modes = served(module._TOGETHER + 1)
    assert modes == [Mode.DECODE] * (module._TOGETHER - 1) + [Mode.EXTEND] * 2
    assert monitor.disabled == {DECODE}

    ranks.told = frozenset()
    modes = served(module._TOGETHER)
    assert modes == [Mode.EXTEND] * (module._TOGETHER - 2) + [Mode.DECODE] * 2


@pytest.mark.parametrize("paused", [1, 3, 90])
def test_ranks_that_see_a_pause_at_different_passes_wait_for_each_other_at_the_same(
    paused: int,
) -> None:
    waited: list[int] = []

    class Waiting(_Follower):
        def from_first(self, value: Any) -> Any:
            waited.append(number)
            return value

    steered = _steering(ranks=Waiting())
    _monitored(steered)
    runner = SimpleNamespace(**{STEERING: steered})
    for number in range(2 * module._TOGETHER):
        (switch.pause if 10 <= number < 10 + paused else switch.resume)()
        around_forward(original([]), runner, batch([8192], [128]))

    assert waited == [module._TOGETHER - 1, 2 * module._TOGETHER - 1]


pass_times = st.lists(
    st.builds(
        PassTime, st.sampled_from(PassMode), st.sampled_from(SIZES + ROWS),
        st.sampled_from(CONTEXTS), st.floats(1.0, 1e9),
    ),
    max_size=30,
)  # fmt: skip
batches = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 900)), min_size=1, max_size=4)


@settings(deadline=None)
@given(pass_times, st.lists(batches, min_size=1, max_size=4))
def test_ranks_with_the_same_times_decide_alike(
    measured: list[PassTime], served: list[list[tuple[int, int]]]
) -> None:
    """Also where one has read them from a file and the other has measured them."""
    times = PassTimes({}, measured)
    ranks = [_steering(times), _steering(PassTimes.from_text(times.as_text()))]

    for lens in served:
        prefix_lens, extend_lens = [one[0] for one in lens], [one[1] for one in lens]
        decided = [_fastest(rank, prefix_lens, extend_lens) for rank in ranks]
        assert decided[0] is decided[1]
