"""What passes take, between and outside of what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

SIZES, CONTEXTS = (8, 64, 512), (4, 1000, 60000)
ENGINE = PassMode.ENGINE
latencies = st.floats(1.0, 1e9)
grids = st.lists(latencies, min_size=9, max_size=9)


def _times(values: list[float]) -> PassTimes:
    points = [(size, context) for size in SIZES for context in CONTEXTS]
    return PassTimes(
        {"gpu": "made up", "layers": 61},
        [
            PassTime(ENGINE, size, context, value)
            for (size, context), value in zip(points, values, strict=True)
        ],
    )


@given(grids)
def test_what_was_measured_is_given_back_unless_more_took_less(values: list[float]) -> None:
    """A host that has something else to do makes a pass longer, never shorter."""
    times = _times(values)

    for one in times.times:
        larger = [
            other.pass_us
            for other in times.times
            if other.q_tokens >= one.q_tokens and other.context >= one.context
        ]
        found = times.pass_us(ENGINE, one.q_tokens, one.context)
        assert found == pytest.approx(min(larger))


def test_a_pass_in_which_keys_are_selected_is_another_one() -> None:
    short, long = PassTime(ENGINE, 8, 2000, 10.0), PassTime(ENGINE, 8, 2100, 20.0, selects=True)
    times = PassTimes({}, [short, long])

    assert times.pass_us(ENGINE, 8, 2050) == pytest.approx(10.0)
    assert times.pass_us(ENGINE, 8, 2050, selects=True) == pytest.approx(20.0)


def test_an_eager_pass_that_selects_launches_as_much_more_as_sglangs_own_way() -> None:
    eager = PassTime(PassMode.EAGER, 512, 2000, 170.0)
    short, long = PassTime(ENGINE, 8, 2000, 50.0), PassTime(ENGINE, 8, 2100, 95.0, selects=True)
    measured = PassTime(PassMode.EAGER, 512, 2100, 230.0, selects=True)

    def launched(*times: PassTime) -> list[float | None]:
        found = PassTimes({}, times)
        return [found.launched_us(8, selects=one) for one in (False, True)]

    assert launched(eager, short, long) == pytest.approx([170.0, 215.0])
    assert launched(eager, short, long, measured) == pytest.approx([170.0, 230.0])
    assert launched(eager, short) == pytest.approx([170.0, 170.0])
    assert launched(short, long) == [None, None]


@given(grids, st.integers(8, 512), st.floats(4, 60000))
def test_between_points_a_time_lies_between_theirs(
    values: list[float], q_tokens: int, context: float
) -> None:
    found = _times(values).pass_us(ENGINE, q_tokens, context)

    assert found is not None
    assert min(values) * 0.999999 <= found <= max(values) * 1.000001


@given(
    st.lists(latencies, min_size=9, max_size=9).map(sorted),
    st.tuples(st.integers(8, 512), st.integers(8, 512)).map(sorted),
    st.tuples(st.floats(4, 60000), st.floats(4, 60000)).map(sorted),
)
def test_where_more_work_took_longer_it_does_so_between_points(
    values: list[float], sizes: list[int], contexts: list[float]
) -> None:
    # Sorted values grow along a row; a column of the grid must grow too.
    grid = [values[0:9:3], values[1:9:3], values[2:9:3]]
    times = _times([grid[j][i] for i in range(3) for j in range(3)])
    few = times.pass_us(ENGINE, sizes[0], contexts[0])
    more = times.pass_us(ENGINE, sizes[1], contexts[1])

    assert few is not None
    assert more is not None
    assert few <= more * 1.000001


def test_passes_that_wait_for_the_host_take_their_lower_quartile() -> None:
    """What else the host had to do while one of them was measured says nothing of its size."""
    waited = [(8, 60.0), (16, 90.0), (64, 120.0), (256, 80.0), (512, 50.0)]
    measured = [PassTime(ENGINE, size, 4, us, host_us=us * 0.99) for size, us in waited]
    times = PassTimes({}, [*measured, PassTime(ENGINE, 1024, 4, 80.0, host_us=55.0)])

    assert [times.pass_us(ENGINE, size, 4) for size, _ in waited] == pytest.approx([60.0] * 5)
    assert times.pass_us(ENGINE, 1024, 4) == pytest.approx(80.0)


@given(grids, st.floats(0, 1))
def test_without_waiting_passes_the_hosts_time_changes_nothing(
    values: list[float], share: float
) -> None:
    plain = _times(values)
    launched = [replace(one, host_us=one.pass_us * share * 0.9) for one in plain.times]
    times = PassTimes({}, launched)

    for one in plain.times:
        expected = plain.pass_us(ENGINE, one.q_tokens, one.context)
        assert times.pass_us(ENGINE, one.q_tokens, one.context) == expected


@given(
    padded=st.floats(1, 400),
    size=st.sampled_from([64, 512]),
    fill=st.floats(0, 1),
    context=st.floats(4, 60000),
)
def test_padding_costs_from_nothing_to_as_much_as_tokens(
    padded: float, size: int, fill: float, context: float
) -> None:
    full = [float(i) for i in (1, 2, 3, 40, 50, 60, 100, 200, 300)]
    times = PassTimes({}, [*_times(full).times, PassTime(ENGINE, 512, 4, padded, padding=447)])
    q_tokens = max(int(fill * size), 1)

    found = times.padded_us(ENGINE, size, q_tokens, context)

    fitting, most = (times.pass_us(ENGINE, one, context) for one in (q_tokens, size))
    assert fitting is not None and most is not None and found is not None
    assert fitting * 0.999999 <= found <= most * 1.000001
    assert times.padded_us(ENGINE, size, size, context) == pytest.approx(most)


def test_a_padded_pass_is_given_back_and_is_no_point_of_the_grid() -> None:
    points = [PassTime(ENGINE, 64, 100, 10.0), PassTime(ENGINE, 512, 100, 90.0)]
    times = PassTimes({}, [*points, PassTime(ENGINE, 512, 100, 40.0, padding=448)])

    assert times.pass_us(ENGINE, 512, 100) == pytest.approx(90.0)
    assert times.padded_us(ENGINE, 512, 64, 100) == pytest.approx(40.0)


def test_where_no_padded_pass_was_measured_padding_costs_as_much_as_tokens() -> None:
    times = _times([float(i) for i in range(1, 10)])

    assert times.padded_us(ENGINE, 512, 65, 4) == times.pass_us(ENGINE, 512, 4)


def test_outside_of_what_was_measured_there_is_no_time() -> None:
    times = _times([float(i) for i in range(1, 10)])

    assert times.pass_us(ENGINE, 513, 4) is None
    assert times.pass_us(ENGINE, 512, 68000) is None
    assert times.pass_us(ENGINE, 100, 68000) is None
    assert times.pass_us(PassMode.DENSE_GRAPH, 8, 4) is None


def test_a_context_a_little_longer_than_measured_takes_as_long() -> None:
    times = _times([float(i) for i in range(1, 10)])

    assert times.pass_us(ENGINE, 512, 67000) == times.pass_us(ENGINE, 512, 60000)


def test_fewer_keys_or_tokens_than_were_measured_take_as_long_as_the_fewest() -> None:
    times = _times([float(i) for i in range(1, 10)])

    assert times.pass_us(ENGINE, 8, 1.0) == times.pass_us(ENGINE, 8, 4)
    assert times.pass_us(ENGINE, 3, 4) == times.pass_us(ENGINE, 8, 4)


def test_a_size_with_fewer_contexts_limits_its_neighbours() -> None:
    times = PassTimes({}, [PassTime(ENGINE, 8, 9000, 1.0), PassTime(ENGINE, 64, 100, 2.0)])

    assert times.pass_us(ENGINE, 8, 9000) == pytest.approx(1.0)
    assert times.pass_us(ENGINE, 32, 9000) is None
    assert times.pass_us(ENGINE, 32, 100) is not None


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
    st.lists(
        st.builds(
            PassTime, st.sampled_from(PassMode), st.integers(1, 2**31 - 1),
            st.integers(1, 2**31 - 1), latencies, st.booleans(), st.none() | latencies,
        ),
        max_size=5,
    ),
)  # fmt: skip
def test_text_gives_back_what_was_written(key: dict[str, object], measured: list[PassTime]) -> None:
    again = PassTimes.from_text(PassTimes(key, measured).as_text())

    assert again.key == key
    assert again.times == tuple(measured)


def _document(**changes: object) -> str:
    one: dict[str, object] = {
        "mode": "engine", "q_tokens": 8, "context": 4, "pass_us": 10.0, "selects": False,
        "host_us": None, "padding": 0,
    }  # fmt: skip
    one.update({name: value for name, value in changes.items() if name in one})
    document: dict[str, object] = {
        "schema": "nsa-tune/pass-times/2", "key": {}, "table": None, "times": [one],
    }  # fmt: skip
    document.update({name: value for name, value in changes.items() if name not in one})
    return json.dumps(document)


def test_the_document_of_the_next_test_is_right_without_changes() -> None:
    assert PassTimes.from_text(_document()).pass_us(ENGINE, 8, 4) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        "[" * 100_000,
        '{"schema": "nsa-tune/pass-times/1"}',
        _document(schema="nsa-tune/pass-times/1"),
        _document(table=7),
        _document(times=None),
        _document(times=[1]),
        _document(key=7),
        _document(mode="by hand"),
        _document(q_tokens=0),
        _document(q_tokens=2**31),
        _document(q_tokens=float("inf")),
        _document(q_tokens=float("nan")),
        _document(q_tokens=[8]),
        _document(context=0),
        _document(context=-float("inf")),
        _document(pass_us=0.5),
        _document(pass_us=float("nan")),
        _document(pass_us=float("inf")),
        _document(host_us=float("nan")),
        _document(host_us=-1.0),
        _document(host_us="fast"),
        _document(padding=8),
        _document(padding=-1),
        _document(pass_us="fast"),
        _document(pass_us=None),
    ],
)
def test_text_that_is_no_times_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        PassTimes.from_text(text)


@given(st.text() | st.binary().map(lambda data: data.decode(errors="replace")))
def test_no_text_raises_anything_else(text: str) -> None:
    with pytest.raises(ValueError):
        PassTimes.from_text(text)


def test_times_of_a_version_that_did_not_measure_the_host_are_read() -> None:
    older = json.loads(_document())
    del older["times"][0]["host_us"], older["times"][0]["padding"]

    assert PassTimes.from_text(json.dumps(older)).times == (PassTime(ENGINE, 8, 4, 10.0),)


def test_memory_is_kept_with_the_times() -> None:
    memory_mib = {"dense graphs": 126, "peak of a measured pass": 900}
    times = PassTimes({"gpu": "made up"}, [], None, memory_mib)

    assert PassTimes.from_text(times.as_text()).memory_mib == memory_mib
    older = json.loads(times.as_text())
    del older["memory_mib"]
    assert PassTimes.from_text(json.dumps(older)).memory_mib == {}
    older["memory_mib"] = ["a list"]
    with pytest.raises(ValueError, match="wrong kind"):
        PassTimes.from_text(json.dumps(older))
