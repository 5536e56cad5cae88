"""Limits found by experiment: real processes that die, hang and lie, and what is stored of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune._errors import MachineUnfit, UnknownName
from nsa_tune.autotune.probe import run as probing
from nsa_tune.autotune.probe.child import Target
from nsa_tune.autotune.probe.run import Limit, ProbeRequest, probe
from nsa_tune.autotune.probe.search import Outcome, Try, attempt, search
from nsa_tune.backend.points import guards
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from tests.autotune import fake_limits
from tests.autotune.fake_limits import LIMIT
from tests.records import ok

TARGET = Target("tiny", 4, "fp8", "cpu")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def importable_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def fake(name: str) -> str:
    return f"{fake_limits.__name__}:{name}"


@pytest.mark.parametrize(
    ("trial", "outcome", "words"),
    [
        ("segfaults", Outcome.KILLED, "SIGSEGV"),
        ("abort", Outcome.KILLED, "SIGABRT"),
        ("exits", Outcome.EXITED, "exit code 1: CUDA error (file.cu:1): invalid argument"),
        ("leaves", Outcome.EXITED, "exit code 0: it said nothing"),
        ("raises", Outcome.EXITED, "smem_size <= smem_capacity"),
        ("wrong", Outcome.WRONG, "relative error 1"),
        ("nan", Outcome.WRONG, "no number"),
        ("memory", Outcome.MEMORY, "CUDA out of memory"),
    ],
)
def test_a_process_tells_what_became_of_it(trial: str, outcome: Outcome, words: str) -> None:
    assert attempt(fake(trial), LIMIT, TARGET, 60).outcome is Outcome.OK

    one = attempt(fake(trial), LIMIT + 1, TARGET, 60)
    assert one.outcome is outcome
    assert words in one.words


def test_a_process_that_hangs_is_ended_at_its_deadline() -> None:
    one = attempt(fake("hangs"), LIMIT + 1, TARGET, 3)

    assert (one.outcome, one.words) == (Outcome.HUNG, "not done after 3 s")


def counted(limit: int, sizes: list[int]) -> Callable[[int], Try]:
    def run(size: int) -> Try:
        sizes.append(size)
        return Try(size, Outcome.OK if size <= limit else Outcome.EXITED)

    return run


@given(
    limit=st.integers(0, 3000),
    start=st.integers(1, 300),
    most=st.integers(300, 2000),
    expected=st.none() | st.integers(1, 2500),
)
def test_the_search_is_exact_whatever_the_formula_says(
    limit: int, start: int, most: int, expected: int | None
) -> None:
    sizes: list[int] = []
    found = search(counted(limit, sizes), start, most, expected)

    assert found.limit == min(limit, most)
    assert (found.past is None) == (limit >= most)
    assert found.past is None or found.past.size == found.limit + 1
    assert len(sizes) == len(set(sizes)) <= 2 + 12 + 11
    assert all(1 <= size <= most for size in sizes)


def test_a_formula_that_holds_takes_two_tries() -> None:
    sizes: list[int] = []
    search(counted(19370, sizes), 1024, 32701, 19370)

    assert sizes == [19370, 19371]


def limit_of(trial: str, **changes: object) -> dict[str, Limit]:
    one = Limit("rows", fake(trial), 32, lambda setting: 64, lambda setting: 36)
    return {"rows": replace(one, **changes)}  # type: ignore[arg-type]


def request(tmp_path: Path, **changes: object) -> ProbeRequest:
    made = ProbeRequest(tmp_path / "nsa-tune.db", device="cpu", model="tiny")
    return replace(made, **changes)  # type: ignore[arg-type]


def stored(tmp_path: Path) -> dict[str, int]:
    """What the database keeps under its one key."""
    with Store.open(tmp_path / "nsa-tune.db") as store:
        rows = store._db.execute("SELECT name, value FROM limits").fetchall()
    return dict(rows)


@pytest.mark.parametrize("blind", [False, True])
def test_what_is_found_is_stored_with_what_happened_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: bool
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("segfaults"))
    seen: list[Try] = []

    class Progress:
        def tried(self, name: str, one: Try) -> None:
            assert name == "rows"
            seen.append(one)

    (one,) = probe(request(tmp_path, blind=blind), Progress())

    assert (one.found.limit, one.formula) == (LIMIT, 36)
    assert one.found.past is not None
    assert "SIGSEGV" in one.found.past.words
    assert list(one.found.tries) == seen
    assert [each.size for each in seen][:2] == ([32, 64] if blind else [36, 37])
    assert stored(tmp_path) == {"rows": LIMIT}


def test_a_cliff_is_stored_with_its_price_and_death_with_what_it_takes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"price": fake("dear"), "price_name": "rows_ns", "also": "deadly_rows"}
    monkeypatch.setattr(probing, "LIMITS", limit_of("wrong", **both))
    (one,) = probe(request(tmp_path))
    # 38 rows for 114 us instead of 37.
    assert one.ns_per_row == round((3 * 38 - 37) * 1e3 / 38)
    assert stored(tmp_path) == {"rows": LIMIT, "rows_ns": one.ns_per_row}

    monkeypatch.setattr(probing, "LIMITS", limit_of("exits", **both))
    (one,) = probe(request(tmp_path))
    assert one.ns_per_row is None
    assert stored(tmp_path)["deadly_rows"] == LIMIT


def test_memory_that_runs_out_and_no_end_at_all_are_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("memory"))
    probe(request(tmp_path))
    monkeypatch.setattr(probing, "LIMITS", limit_of("segfaults", most=lambda setting: LIMIT - 2))
    (one,) = probe(request(tmp_path))

    assert one.found.past is None
    assert stored(tmp_path) == {}


def test_a_limit_is_found_again_in_the_table_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("raises"))
    probe(request(tmp_path))
    path = tmp_path / "nsa-tune.db"
    with Store.open(path) as store:
        run = store._db.execute("SELECT max(id) FROM runs").fetchone()[0]
        store.add(run, [ok("extend:0+128")])

    (table,) = read_database(path)
    assert table.limits == {"rows": LIMIT}


def test_a_cpu_has_nothing_to_probe_and_a_limit_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(MachineUnfit, match="nothing to probe"):
        probe(request(tmp_path))
    with pytest.raises(UnknownName, match="deep_gemm_metadata_rows"):
        probe(request(tmp_path, limits=("depth",)))


def test_every_limit_is_one_that_guards_consult() -> None:
    named = {
        name for one in probing.LIMITS.values() for name in (one.name, one.price_name, one.also)
    }
    assert named - {""} == set(guards.PROBED)
