"""What the service answers over HTTP: the addresses that hosts, workers and scripts rely on."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import read_text
from nsa_tune.fleet.service.auth.tokens import Role, Tokens
from nsa_tune.fleet.service.http import table_endpoints
from nsa_tune.fleet.service.state import State
from tests.db.loose import loosen
from tests.fleet.service.made_up_tables import H200, H200_KEY, TARGET, grown, text_of
from tests.fleet.service.served import Served, served
from tests.serving import Answer

CLAIM = {"claim": "c" * 16}
HOST = {
    **CLAIM, "worker": "gpu-7", "gpu": H200_KEY.gpu, "driver": H200_KEY.driver,
    "libraries": dict(H200_KEY.libraries),
}  # fmt: skip


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "t.db") as running:
        yield running


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that several tests share, none of which leaves anything in it."""
    with served(tmp_path_factory.mktemp("empty") / "t.db") as running:
        yield running


def _pushed(service: Served, batches: int = 2, minute: int = 0) -> dict[str, int]:
    answer = service.post("/v1/tables", text_of(grown(batches, minute=minute)))
    assert answer.status == 200, answer.body
    found: dict[str, int] = answer.document
    return found


def _checked(answer: Answer) -> Answer:
    """The answer, whose hashes are those of its body."""
    digest = hashlib.sha256(answer.body).hexdigest()
    assert answer.status == 200
    assert answer.headers["etag"] == f'"sha256-{digest}"'
    assert answer.headers["x-content-sha256"] == digest
    return answer


# --- who may do what


READS = ["/v1/database", "/v1/tables", "/v1/jobs", "/v1/workers", "/metrics", "/", "/queue",
         "/assets/page.css"]  # fmt: skip
POSTS = {
    "/v1/wanted": Role.READ, "/v1/tables": Role.SUBMIT, "/v1/decisions": Role.SUBMIT,
    "/v1/findings": Role.SUBMIT, "/v1/jobs/claim": Role.SUBMIT, "/v1/jobs/1/beat": Role.SUBMIT,
    "/v1/jobs/1/done": Role.SUBMIT, "/v1/jobs/1/failed": Role.SUBMIT,
    "/v1/jobs/1/release": Role.SUBMIT, "/v1/jobs": Role.ADMIN, "/v1/jobs/1/approve": Role.ADMIN,
    "/v1/jobs/1/cancel": Role.ADMIN, "/v1/jobs/cancel": Role.ADMIN,
    "/v1/weights/forget": Role.ADMIN,
}  # fmt: skip


def test_nobody_gets_in_without_a_token(empty: Served) -> None:
    for method, path in [*(("GET", one) for one in READS), *(("POST", one) for one in POSTS)]:
        for token in (None, "", "nst_wrong", empty.tokens[Role.READ] + "x"):
            answer = empty.ask(method, path, b"{}" if method == "POST" else None,
                                 role=None, token=token)  # fmt: skip
            assert answer.status == 401, (method, path, token)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "`nsa-tune token add`" in answer.document["error"]


def test_a_role_that_is_too_low_is_told_so(empty: Served) -> None:
    for path, needed in POSTS.items():
        for role in Role:
            answer = empty.post(path, {}, role=role)
            if role.allows(needed):
                assert answer.status in (200, 400, 404), (path, role)
            else:
                assert answer.status == 403
                assert answer.document == {
                    "error": f"token {role} has the role {role}, and this needs {needed}"
                }
    for path in READS:
        assert empty.get(path).status == 200


def test_every_answer_is_careful_and_every_error_a_sentence(empty: Served) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("DELETE", "/v1/tables", 405), ("GET", "/v1/jobs/1/done", 405),
        ("POST", "/v1/jobs/x/done", 403), ("GET", "/v1/tables/0", 404),
    ):  # fmt: skip
        answer = empty.ask(method, path)
        assert answer.status == status, path
        assert isinstance(answer.document["error"], str)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_probe_needs_no_token_and_learns_nothing(empty: Served) -> None:
    assert empty.get("/healthz", role=None).document == {"ok": True}


# --- tables


def test_the_database_is_pulled_whole_and_once(service: Served, tmp_path: Path) -> None:
    _pushed(service)
    first = _checked(service.get("/v1/database"))
    assert first.headers["content-type"] == "application/vnd.sqlite3"
    copy = tmp_path / "copy.db"
    copy.write_bytes(first.body)
    (table,) = read_database(copy)
    assert (table.key, len(table.measurements)) == (H200_KEY, 4)
    assert sorted(path.name for path in tmp_path.glob("copy.db*")) == ["copy.db"], "no log"

    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        again = service.get("/v1/database", If_None_Match=known)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert _pushed(service) == {"added": 0, "known": 4}
    assert service.get("/v1/database", If_None_Match=tag).status == 304
    _pushed(service, 3, minute=1)
    assert _checked(service.get("/v1/database", If_None_Match=tag)).headers["etag"] != tag


def test_the_same_tables_have_the_same_hash_after_a_restart(tmp_path: Path) -> None:
    tags = []
    for database in ("t.db", "t.db"):
        (tmp_path / "t.service.db").unlink(missing_ok=True)
        with served(tmp_path / database) as service:
            _pushed(service)
            tags.append(service.get("/v1/database").headers["etag"])
    assert tags[0] == tags[1]


def test_a_host_that_has_its_tables_makes_a_restarted_service_make_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/v1/database?{urlencode(TARGET)}"
    with served(tmp_path / "t.db") as service:
        _pushed(service)
        first = service.get(path)
        assert first.headers["x-content-sha256"] == hashlib.sha256(first.body).hexdigest()
    (tmp_path / "t.service.db").unlink()

    def of_keys(*_: object) -> None:
        raise AssertionError("a body is made")

    with served(tmp_path / "t.db") as service, monkeypatch.context() as patched:
        patched.setattr(table_endpoints, "of_keys", of_keys)
        assert service.get(path, If_None_Match=first.headers["etag"]).status == 304
        patched.undo()
        _pushed(service, 3, minute=1)
        changed = service.get(path, If_None_Match=first.headers["etag"])
        assert (changed.status, len(changed.body) > 0) == (200, True)


def test_the_database_has_no_tokens_and_no_jobs(service: Served, tmp_path: Path) -> None:
    service.post("/v1/jobs", TARGET, role=Role.ADMIN)
    (tmp_path / "copy.db").write_bytes(service.get("/v1/database").body)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        names = {name for (name,) in copy.execute("SELECT name FROM sqlite_master")}
    assert "measurements" in names
    assert not {"tokens", "jobs"} & names


def test_tables_are_listed_and_pulled_by_their_content(service: Served, tmp_path: Path) -> None:
    assert service.get("/v1/tables").document == {"tables": []}
    _pushed(service)
    listed = _checked(service.get("/v1/tables"))
    (one,) = listed.document["tables"]
    assert {name: one[name] for name in TARGET} == TARGET
    assert (one["digest"], one["rows"], one["doubtful"]) == (H200_KEY.digest, 4, [])
    assert one["driver"] == H200_KEY.driver
    assert one["libraries"] == dict(H200_KEY.libraries)
    text = _checked(service.get(one["url"]))
    (tmp_path / "pulled.tsv").write_bytes(text.body)
    assert read_text(tmp_path / "pulled.tsv").measurements == grown(2).measurements
    assert service.get(one["url"], If_None_Match=text.headers["etag"]).status == 304
    assert service.get("/v1/tables", If_None_Match=listed.headers["etag"]).status == 304
    assert service.post("/v1/tables", text.body).document == {"added": 0, "known": 4}

    _pushed(service, 3, minute=1)
    gone = service.get(one["url"])
    assert gone.status == 404
    assert "see /v1/tables" in gone.document["error"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"nonsense", 400, "not a table of nsa-tune"),
        (b"x" * (2**24 + 1), 413, "more than 16777216 bytes"),
        (text_of(grown(2)).replace(b"\t100", b"\t101"), 400, "the table was changed"),
    ],
)
def test_a_bad_table_is_refused_in_a_sentence(
    body: bytes, status: int, words: str, empty: Served
) -> None:
    answer = empty.post("/v1/tables", body)
    assert answer.status == status
    assert words in answer.document["error"]
    assert "/tmp" not in answer.document["error"]
    assert empty.get("/v1/tables").document == {"tables": []}


@pytest.mark.parametrize("value", [None, 5, 0.5])
def test_a_damaged_table_costs_its_own_report_and_a_line_a_minute(
    value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.db"
    keys = (H200_KEY, replace(H200_KEY, heads=16))
    with Store.open(path) as store:
        for key in keys:
            store.add(store.begin_run(key, H200, {}), grown(2, key).measurements)
    loosen(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE measurements SET batch = ? WHERE id = 1", [value])
    with served(path) as service:
        assert [service.get(page).status for page in ("/", "/v1/tables")] == [200, 200]
        bad, good, again = (service.get(f"/report/{key.digest}") for key in (*keys, keys[0]))

    assert (bad.status, good.status, again.status) == (503, 200, 503)
    assert [line.name.rpartition(".")[2] for line in caplog.records] == ["application"]
    assert "t.db is damaged" in bad.document["error"]


def test_a_body_that_was_changed_on_the_way_is_refused(empty: Served) -> None:
    answer = empty.post("/v1/tables", text_of(grown(2)), X_Content_SHA256="0" * 64)
    assert answer.status == 400
    assert "X-Content-SHA256" in answer.document["error"]


# --- jobs


def _job(answer: Answer) -> dict[str, Any]:
    assert answer.status in (200, 201), answer.body
    found: dict[str, Any] = answer.document["job"]
    return found


def test_a_table_that_is_wanted_becomes_a_job_and_then_a_table(service: Served) -> None:
    wanted = service.post("/v1/wanted", TARGET, role=Role.READ).document
    assert wanted["table"] is None
    assert (wanted["job"]["state"], wanted["job"]["created_by"]) == ("proposed", "read")
    assert service.post("/v1/jobs/claim", HOST).document["job"] is None
    assert _job(service.post("/v1/jobs/1/approve", {}, role=Role.ADMIN))["state"] == "queued"
    claimed = service.post("/v1/jobs/claim", HOST).document
    assert claimed["lease_s"] == 120.0
    assert claimed["job"]["kv_dtype"] == "fp8"
    assert _job(service.post("/v1/jobs/1/beat", {**CLAIM, "rows": 2}))["rows"] == 2
    _pushed(service)
    assert _job(service.post("/v1/jobs/1/done", {**CLAIM, "rows": 4}))["state"] == "done"
    assert _job(service.post("/v1/jobs/1/done", {**CLAIM, "rows": 4}))["state"] == "done"
    found = service.post("/v1/wanted", {"key": TARGET}, role=Role.READ).document
    assert found == {"table": H200_KEY.digest, "job": None}
    jobs = service.get("/v1/jobs?state=done").document["jobs"]
    assert [(one["id"], one["attempts"], one["worker"]) for one in jobs] == [(1, 1, "gpu-7")]
    (worker,) = service.get("/v1/workers").document["workers"]
    assert (worker["name"], worker["driver"]) == ("gpu-7", H200_KEY.driver)


def test_a_claim_is_no_ones_to_read(service: Served) -> None:
    service.post("/v1/jobs", TARGET, role=Role.ADMIN)
    service.post("/v1/jobs/claim", HOST)
    assert CLAIM["claim"].encode() not in service.get("/v1/jobs").body
    stranger = service.post("/v1/jobs/1/done", {"claim": "d" * 16})
    assert stranger.status == 409
    assert "no longer yours" in stranger.document["error"]


def test_what_an_admin_adds_is_queued(service: Served) -> None:
    body = {**TARGET, "points": ["decode"], "fresh": True, "budget_s": 60}
    job = _job(service.post("/v1/jobs", body, role=Role.ADMIN))
    assert (job["state"], job["points"], job["fresh"]) == ("queued", ["decode"], True)
    assert job["budget_s"] == 60.0
    assert _job(service.post("/v1/jobs/1/cancel", {}, role=Role.ADMIN))["state"] == "cancelled"
    again = service.post("/v1/jobs/1/approve", {}, role=Role.ADMIN)
    assert (again.status, again.document["error"]) == (
        400, "job 1 is cancelled and cannot be approved"
    )  # fmt: skip
    assert service.post("/v1/jobs/2/approve", {}, role=Role.ADMIN).status == 404


@pytest.mark.parametrize("number", ["9" * 18, "9" * 30, "9" * 5000, "1.5", "one"])
def test_a_job_of_an_absurd_number_is_none(number: str, empty: Served) -> None:
    for act in ("approve", "beat"):
        answer = empty.post(f"/v1/jobs/{number}/{act}", CLAIM, role=Role.ADMIN)
        assert answer.status == 404
        assert answer.document["error"] == f"there is no job {number[:40]}"


def test_weights_of_absurdly_many_heads_are_refused(empty: Served) -> None:
    query = f"gpu=H200&model=deepseek-v3.2&kv_dtype=fp8&heads={'9' * 5000}"
    assert empty.get(f"/v1/weights?{query}").status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", b"nonsense"),
        ("/v1/jobs", b"[" * 20_000),
        ("/v1/jobs", b"[]"),
        ("/v1/jobs", json.dumps({**TARGET, "points": ["nonsense"]}).encode()),
        ("/v1/jobs", json.dumps({**TARGET, "points": "decode"}).encode()),
        ("/v1/jobs", json.dumps({**TARGET, "budget_s": -1}).encode()),
        ("/v1/jobs/claim", json.dumps({**HOST, "claim": "short"}).encode()),
        ("/v1/jobs/claim", json.dumps({**HOST, "worker": 5}).encode()),
        ("/v1/jobs/1/beat", json.dumps({**CLAIM, "rows": -1}).encode()),
        ("/v1/wanted", json.dumps({**TARGET, "heads": 10**30}).encode()),
    ],
)
def test_a_body_that_means_nothing_is_refused(path: str, body: bytes, empty: Served) -> None:
    answer = empty.post(path, body, role=Role.ADMIN)
    assert answer.status == 400
    assert isinstance(answer.document["error"], str)
    assert empty.get("/v1/jobs").document == {"jobs": []}


def test_a_body_without_end_is_cut_off(empty: Served) -> None:
    assert empty.post("/v1/wanted", b"x" * (2**18 + 1)).status == 413


# --- what engines and sentinels say


def test_a_finding_doubts_a_table_and_proposes_a_job(service: Served) -> None:
    _pushed(service)
    body = {"key": H200_KEY.digest, "point": "prefill", "drift": 0.3}
    job = _job(service.post("/v1/findings", body))
    assert (job["state"], job["points"], job["fresh"]) == ("proposed", ["prefill"], True)
    (one,) = service.get("/v1/tables").document["tables"]
    assert one["doubtful"] == ["prefill"]
    assert service.post("/v1/findings", {**body, "key": "0" * 16}).status == 404


def test_decisions_become_weights(service: Served) -> None:
    line = {"schema": "nsa-tune/decision/1", "time": 1.0, "pid": 7, **TARGET, "count": 5,
            "batch": "extend:0+16", "own": {}, "taken": {}}  # fmt: skip
    log = json.dumps(line).encode() + b"\n"
    assert service.post("/v1/decisions", log).document == {"decisions": 5, "batches": 1}
    assert service.post("/v1/decisions", log).document == {"decisions": 0, "batches": 0}
    query = "gpu=NVIDIA%20H200&model=deepseek-v3.2&heads=128&kv_layout=fp8_packed"
    found = _checked(service.get(f"/v1/weights?{query}"))
    assert [json.loads(one)["count"] for one in found.body.splitlines()] == [5]
    assert service.get("/v1/weights?model=x").status == 400
    assert service.post("/v1/decisions", b"nonsense").status == 400


def test_metrics_count_what_happened(service: Served) -> None:
    _pushed(service)
    _pushed(service)
    service.post("/v1/findings", {"key": H200_KEY.digest, "point": "prefill"})
    service.get("/v1/tables", role=None)
    answer = service.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert found["nsa_tune_uploaded_rows_total", "added"] == 4
    assert found["nsa_tune_uploaded_rows_total", "known"] == 4
    assert found["nsa_tune_tables",] == 1
    assert found["nsa_tune_measurements",] == 4
    assert found["nsa_tune_doubtful_tables",] == 1
    assert found["nsa_tune_jobs", "proposed"] == 1
    assert found["nsa_tune_requests_total", "GET", "/v1/tables", "401"] == 1
    assert found["nsa_tune_database_bytes",] > 0


def test_a_token_in_a_page_s_address_becomes_a_cookie(service: Served) -> None:
    token = service.tokens[Role.READ]
    moved = service.get(f"/?token={token}&x=1", role=None)
    assert (moved.status, moved.headers["location"]) == (303, "/?x=1")
    cookie = moved.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    pair = cookie.partition(";")[0]
    assert service.get("/", role=None, Cookie=pair).status == 200
    assert service.get("/?token=wrong", role=None).status == 401
    # A page of another site could make a browser send a cookie: nothing is written by one.
    admin = pair.partition("=")[0] + "=" + service.tokens[Role.ADMIN]
    assert service.post("/v1/jobs", TARGET, role=None, Cookie=admin).status == 401
    assert service.get("/v1/tables", role=None, Cookie=pair).status == 401


def test_a_revoked_token_is_refused_at_once(service: Served, tmp_path: Path) -> None:
    assert service.get("/v1/tables").status == 200
    with State.open(tmp_path / "t.service.db") as state:
        Tokens(state).revoke("read")
    answer = service.get("/v1/tables")
    assert answer.status == 401
    assert "revoked" in answer.document["error"]
