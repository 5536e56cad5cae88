"""`nsa-tune probe`: what is found on a fake limit, and what is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune._errors import MachineUnfit, UnknownName, UsageError
from nsa_tune.autotune.probe import run as probing
from nsa_tune.autotune.probe.child import Target
from nsa_tune.autotune.probe.run import Limit, ProbeRequest, probe
from nsa_tune.autotune.probe.tries import Outcome, Try
from nsa_tune.backend.libraries.limits import PROBED
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from tests.autotune import fake_limits
from tests.autotune.fake_limits import LIMIT
from tests.records import ok


def fake(name: str) -> str:
    return f"{fake_limits.__name__}:{name}"


def limit_of(trial: str, **changes: object) -> dict[str, Limit]:
    one = Limit("rows", fake(trial), 32, lambda setting: 64, lambda setting: 36)
    return {"rows": replace(one, **changes)}  # type: ignore[arg-type]


def request(tmp_path: Path, **changes: object) -> ProbeRequest:
    made = ProbeRequest(tmp_path / "nsa-tune.db", device="cpu", model="tiny")
    return replace(made, **changes)  # type: ignore[arg-type]


def stored(tmp_path: Path) -> dict[str, int]:
    """What the database keeps under its one key."""
    with Store.open(tmp_path / "nsa-tune.db") as store:
        rows = store._connection.execute("SELECT name, value FROM limits").fetchall()
    return dict(rows)


@pytest.mark.parametrize("blind", [False, True])
def test_a_limit_is_stored_and_the_try_past_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: bool
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("segfaults"))
    seen: list[Try] = []

    def told(name: str, one: Try) -> None:
        assert name == "rows"
        seen.append(one)

    (one,) = probe(request(tmp_path, blind=blind), told)

    assert (one.found.limit, one.formula) == (LIMIT, 36)
    assert one.found.past is not None
    assert "SIGSEGV" in one.found.past.words
    assert list(one.found.tries) == seen
    assert [each.size for each in seen][:2] == ([32, 64] if blind else [36, 37])
    assert stored(tmp_path) == {"rows": LIMIT}


def test_a_slow_kernel_stores_its_time_and_a_dead_one_the_other_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"time_trial": fake("dear"), "time_name": "rows_ns", "also": "deadly_rows"}
    monkeypatch.setattr(probing, "LIMITS", limit_of("wrong", **both))
    (one,) = probe(request(tmp_path))
    # 38 rows for 114 us instead of 37.
    assert one.ns_per_row == round((3 * 38 - 37) * 1e3 / 38)
    assert stored(tmp_path) == {"rows": LIMIT, "rows_ns": one.ns_per_row}

    monkeypatch.setattr(probing, "LIMITS", limit_of("exits", **both))
    (one,) = probe(request(tmp_path))
    assert one.ns_per_row is None
    assert stored(tmp_path)["deadly_rows"] == LIMIT


def test_nothing_is_stored_when_memory_runs_out_or_every_size_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("memory"))
    probe(request(tmp_path))
    monkeypatch.setattr(probing, "LIMITS", limit_of("segfaults", most=lambda setting: LIMIT - 2))
    (one,) = probe(request(tmp_path))

    assert one.found.past is None
    assert stored(tmp_path) == {}


@pytest.mark.parametrize(
    ("trial", "control", "why"),
    [
        ("refuses", "broken", "does not work: exit code 1: ImportError: libcudart.so.12"),
        ("broken", "broken", "does not work: exit code 1: ImportError: libcudart.so.12"),
        ("held", "dear", "out of memory, at size 1 already"),
        ("killed", "dear", "SIGKILL: it wrote nothing, at size 1 already"),
    ],
)
def test_a_kernel_that_could_not_be_tried_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: str, control: str, why: str
) -> None:
    limits = limit_of(trial, control=fake(control), start=1, most=lambda setting: 1)
    monkeypatch.setattr(probing, "LIMITS", limits)
    (one,) = probe(request(tmp_path, blind=True))

    assert why in one.untried
    assert stored(tmp_path) == {}


def test_a_kernel_that_refuses_every_size_has_a_limit_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limit_of("refuses", control=fake("dear"), start=1, most=lambda setting: 1)
    monkeypatch.setattr(probing, "LIMITS", limits)
    (one,) = probe(request(tmp_path, blind=True))

    assert (one.untried, one.found.limit) == ("", 0)
    assert stored(tmp_path) == {"rows": 0}


@pytest.mark.parametrize(
    ("outcome", "again", "why"),
    [
        (Outcome.HUNG, Outcome.HUNG, "no answer, at size 1 already"),
        (Outcome.EXITED, Outcome.OK, "succeeded when it was tried again"),
        (Outcome.EXITED, Outcome.HUNG, "no answer, at size 1 already"),
    ],
)
def test_a_smallest_size_that_fails_but_once_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, again: Outcome, why: str
) -> None:
    # The first try, the control, the second try.
    results = [outcome, Outcome.OK, again]

    def attempted(trial: str, size: int, target: Target, deadline_s: float) -> Try:
        return Try(size, results.pop(0), "no answer")

    monkeypatch.setattr(probing, "attempt", attempted)
    limits = limit_of("refuses", control=fake("dear"), start=1, most=lambda setting: 1)
    monkeypatch.setattr(probing, "LIMITS", limits)
    (one,) = probe(request(tmp_path, blind=True))

    assert why in one.untried
    assert stored(tmp_path) == {}


def test_every_kernel_has_a_control() -> None:
    assert all(one.control for one in probing.LIMITS.values())


def test_a_stored_limit_is_in_the_table_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIMITS", limit_of("raises"))
    probe(request(tmp_path))
    path = tmp_path / "nsa-tune.db"
    with Store.open(path) as store:
        run = store._connection.execute("SELECT max(id) FROM runs").fetchone()[0]
        store.add(run, [ok("extend:0+128")])

    (table,) = read_database(path)
    assert table.limits == {"rows": LIMIT}


def test_a_cpu_has_nothing_to_probe_and_unknown_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineUnfit, match="nothing to probe"):
        probe(request(tmp_path))
    with pytest.raises(UnknownName, match="deep_gemm_metadata_rows"):
        probe(request(tmp_path, limits=("depth",)))


def test_guards_use_every_limit() -> None:
    named = {
        name for one in probing.LIMITS.values() for name in (one.name, one.time_name, one.also)
    }
    assert named - {""} == set(PROBED)


def test_a_model_without_sparse_kernels_has_no_such_limits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tiny-mla has none"):
        probe(request(tmp_path, model="tiny-mla", kv_dtype="bf16"))
