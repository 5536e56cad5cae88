"""When a job is proposed: no table, another driver or library, a table that no longer holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune._errors import NoTunedData, UnknownName, UsageError
from nsa_tune.fleet.service.jobs.demand import Demand
from nsa_tune.fleet.service.jobs.job import Worker
from nsa_tune.fleet.service.jobs.queue import Jobs
from nsa_tune.fleet.service.jobs.targets import Target, kv_dtype_of
from nsa_tune.fleet.service.state import State
from tests.fleet.service.made_up_tables import H200_KEY, TARGET

KEYS = (H200_KEY, replace(H200_KEY, heads=16))
LIBRARIES = dict(H200_KEY.libraries)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    with State.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture
def jobs(state: State) -> Jobs:
    return Jobs(state)


@pytest.fixture
def demand(state: State, jobs: Jobs) -> Demand:
    return Demand(state, jobs)


def test_what_is_there_needs_no_job(demand: Demand, jobs: Jobs) -> None:
    exact = Target.of({**TARGET, "driver": H200_KEY.driver, "libraries": LIBRARIES})
    for target in (Target.of(TARGET), exact):
        assert demand.wanted(target, KEYS, "host") == (H200_KEY.digest, None)
    assert jobs.all() == []


def test_without_any_table_whoever_has_the_gpu_may_make_one(demand: Demand) -> None:
    target = Target.of({**TARGET, "heads": 64, "driver": "9", "libraries": {"torch": "9"}})
    digest, job = demand.wanted(target, KEYS, "host")
    assert digest == ""
    assert job is not None
    assert job.reason == "no table, and host asked for it"
    assert (job.target.heads, job.target.driver, job.target.libraries) == (64, None, None)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"driver": "999.1"}, "no table of driver 999.1, and host asked for it"),
        ({"libraries": {"torch": "9"}}, "no table of these libraries, and host asked for it"),
    ],
)
def test_another_driver_or_library_needs_a_table_of_its_own(
    changed: dict[str, object], reason: str, demand: Demand
) -> None:
    target = Target.of({**TARGET, "driver": H200_KEY.driver, "libraries": LIBRARIES, **changed})
    _, job = demand.wanted(target, KEYS, "host")
    assert job is not None
    assert (job.reason, job.target, job.fresh) == (reason, target, False)


def test_a_worker_with_a_new_driver_is_enough_of_a_reason(demand: Demand, jobs: Jobs) -> None:
    worker = Worker("gpu-7", H200_KEY.gpu, "999.1", H200_KEY.libraries)
    found = demand.arrived(worker, KEYS, "workers")
    assert [job.target.heads for job in found] == [16, 128]
    assert {job.reason for job in found} == {"no table of driver 999.1, and gpu-7 has them"}
    for job in found:
        jobs.approve(job.number)
    mine = jobs.claim(worker, "a" * 16)
    assert mine is not None
    assert mine.target.driver == "999.1"
    assert demand.arrived(worker, KEYS, "workers") == [], "it was here before"
    same = Worker("gpu-8", H200_KEY.gpu, H200_KEY.driver, H200_KEY.libraries)
    assert demand.arrived(same, KEYS, "workers") == []
    assert demand.arrived(worker._replace(name="cpu", gpu="CPU"), KEYS, "workers") == []


# --- findings


def test_a_finding_doubts_a_table_until_it_was_measured_again(demand: Demand, jobs: Jobs) -> None:
    for point in ("prefill", "decode", "prefill"):
        job = demand.found({"key": H200_KEY.digest, "point": point, "drift": 0.2}, KEYS, "host")
    assert (job.number, job.points, job.fresh) == (1, ("decode", "prefill"), True)
    assert job.target == Target.of_key(H200_KEY)
    assert demand.doubtful() == {H200_KEY.digest: ["decode", "prefill"]}
    jobs.approve(1)
    jobs.claim(Worker("w", H200_KEY.gpu, H200_KEY.driver, H200_KEY.libraries), "a" * 16)
    assert demand.doubtful()
    jobs.end(1, "a" * 16, "done", 5)
    assert demand.doubtful() == {}


def test_a_finding_on_a_new_driver_is_measured_with_that(demand: Demand) -> None:
    document = {"key": H200_KEY.digest, "point": "prefill", "driver": "999.1",
                "libraries": {"torch": "9"}}  # fmt: skip
    job = demand.found(document, KEYS, "host")
    assert (job.target.driver, job.target.libraries) == ("999.1", (("torch", "9"),))
    assert demand.doubtful() == {H200_KEY.digest: ["prefill"]}


def test_a_job_that_failed_leaves_the_doubt(demand: Demand, jobs: Jobs) -> None:
    key = {**TARGET, "driver": H200_KEY.driver, "libraries": LIBRARIES,
           "protocol": H200_KEY.protocol}  # fmt: skip
    demand.found({"key": key, "point": "prefill"}, KEYS, "host")
    jobs.approve(1)
    jobs.claim(Worker("w", H200_KEY.gpu, H200_KEY.driver, H200_KEY.libraries), "a" * 16)
    jobs.end(1, "a" * 16, "failed", 0, "no kernels")
    assert demand.doubtful() == {H200_KEY.digest: ["prefill"]}


@pytest.mark.parametrize(
    ("document", "error", "words"),
    [
        ({"key": "0" * 16, "point": "prefill"}, NoTunedData, "no table of that key"),
        ({"key": {**TARGET, "driver": "9"}, "point": "prefill"}, NoTunedData, "no table of that"),
        ({"key": 7, "point": "prefill"}, UsageError, "'key' must be a table's digest"),
        ({"key": H200_KEY.digest}, UsageError, "'point' must be a text"),
        ({"key": H200_KEY.digest, "point": "x"}, UnknownName, "unknown"),
        ({"key": H200_KEY.digest, "point": "decode", "x": "y" * 70_000}, UsageError, "16384"),
    ],
)
def test_a_finding_about_nothing_is_refused(
    document: dict[str, object], error: type[Exception], words: str, demand: Demand
) -> None:
    with pytest.raises(error, match=words):
        demand.found(document, KEYS, "host")
    assert demand.doubtful() == {}


# --- targets


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gpt"}, "unknown model 'gpt'"),
        ({"heads": 7}, "7 local heads do not divide"),
        ({"heads": "16"}, "'heads' must be a whole number"),
        ({"heads": True}, "'heads' must be a whole number"),
        ({"gpu": ""}, "'gpu' must be the name"),
        ({"gpu": "x" * 500}, "'gpu' must be a text of at most 400"),
        ({"gpu": "a\x1b[2Jb"}, "'gpu' must be a text"),
        ({"gpu": "\ud800"}, "'gpu' must be a text"),
        ({"kv_layout": "fp8_raw"}, "unknown KV layout of deepseek-v3.2 'fp8_raw'; use one of"),
        ({"libraries": 3}, "'libraries' must be an object"),
        ({"libraries": {"a": 1}}, "'a' must be a text"),
        ({"driver": 5}, "'driver' must be a text"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_measured_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Target.of({**TARGET, **changes})


def test_a_target_may_name_the_dtype() -> None:
    named = {name: value for name, value in TARGET.items() if name not in ("kv_layout", "heads")}
    assert Target.of({**named, "kv_dtype": "fp8"}) == Target.of(TARGET)
    assert kv_dtype_of("deepseek-v4", "v4_paged") == "fp8"
    assert kv_dtype_of("tiny", "bf16") == "bf16"
