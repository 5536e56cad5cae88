"""`db merge` and `db push` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_tune.db.checks import Anchor, Check
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from tests.fleet.server import Kept, Server, serving
from tests.shell import GPU, Shell


@pytest.fixture
def text(database: Path, shell: Shell, tmp_path: Path) -> Path:
    path = tmp_path / "h16.tsv"
    assert shell("db", "export", "--heads", "16", "--db", str(database), "-o", str(path)).code == 0
    return path


def test_merging_prints_the_same_contents_in_any_order(
    database: Path, text: Path, shell: Shell, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.db", tmp_path / "other.db"
    first = shell("db", "merge", str(database), str(text), "--db", str(one))
    second = shell("db", "merge", str(text), str(database), str(text), "--db", str(other))

    assert first.code == second.code == 0
    assert sorted(first.out.splitlines()) == sorted(second.out.splitlines())
    assert len(first.out.splitlines()) == 2
    assert "measurements added, 0 known" in first.err
    assert f"{text}: 0 measurements added" in second.err


def test_a_merge_as_json(database: Path, shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "one.db"

    found = json.loads(shell("db", "merge", str(database), "--db", str(path), "--json").out)

    assert found["schema"] == "nsa-tune/db-merge/1"
    assert found["added"] == sum(table["measurements"] for table in found["tables"]) > 0
    assert {len(table["content"]) for table in found["tables"]} == {32}
    assert shell("lookup", "extend:0+8", *GPU, "--db", str(path), "--strict").code == 0


def test_an_address_can_be_merged(database: Path, shell: Shell, tmp_path: Path) -> None:
    with serving(Kept({"/v1/database": database.read_bytes()})) as server:
        done = shell("db", "merge", server.url, "--db", str(tmp_path / "own.db"))

    assert done.code == 0
    assert len(read_database(tmp_path / "own.db")) == 2


def test_a_file_that_is_none_is_named(shell: Shell, tmp_path: Path) -> None:
    done = shell("db", "merge", str(tmp_path / "none.db"), "--db", str(tmp_path / "own.db"))

    assert done.code == 1
    assert f"there is no file {tmp_path / 'none.db'}" in done.err


def test_import_sends_whoever_gives_a_database_to_merge(
    database: Path, shell: Shell, tmp_path: Path
) -> None:
    done = shell("db", "import", str(database), "--db", str(tmp_path / "own.db"))

    assert done.code == 2
    assert f"`nsa-tune db merge {database}`" in done.err
    assert not (tmp_path / "own.db").exists()


def test_what_cannot_be_fitted_is_not_merged(
    database: Path, text: Path, shell: Shell, tmp_path: Path
) -> None:
    bad, own = tmp_path / "bad.tsv", tmp_path / "own.db"
    lines = text.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("# content", "# weights"))]
    bad.write_text("".join(kept).replace("prefill\textend:0+", "prefill\tjunk:0+", 1))
    assert shell("db", "merge", str(database), "--db", str(own)).code == 0

    done = shell("db", "merge", str(bad), "--db", str(own))

    assert done.code == 1
    assert "junk" in done.err
    assert shell("lookup", "extend:0+8", *GPU, "--db", str(own), "--strict").code == 0


# --- pushing


@pytest.fixture
def service() -> Iterator[Server]:
    with serving(Kept(token="right")) as server:
        yield server


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TUNE_TOKEN", "right")


def _line(number: int) -> str:
    return json.dumps({"schema": "nsa-tune/decision/1", "time": number})


@pytest.mark.usefixtures("token")
def test_a_log_is_sent_whole_and_without_half_a_line(
    service: Server, shell: Shell, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    log.write_text(f"{_line(1)}\n{_line(2)}\n{_line(3)[:9]}")

    assert shell("db", "push", service.url, "--log", str(log)).code == 0

    (posted,) = service.kept.posted
    assert posted.path == "/v1/decisions"
    assert posted.body.decode() == f"{_line(1)}\n{_line(2)}\n"
    assert posted.headers["Authorization"] == "Bearer right"


@pytest.mark.usefixtures("token")
def test_the_pieces_of_a_long_log_begin_at_the_same_lines_when_it_has_grown(
    service: Server, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_tune.fleet import push

    monkeypatch.setattr(push, "_PIECE", 200)
    log = tmp_path / "decisions.jsonl"
    lines = [f"{_line(number)}\n" for number in range(20)]
    sent: list[list[str]] = []
    for count in (13, 20):
        service.kept.posted.clear()
        log.write_text("".join(lines[:count]))
        shell("db", "push", service.url, "--log", str(log))
        sent.append([one.body.decode() for one in service.kept.posted])

    assert "".join(sent[1]) == "".join(lines)
    assert sent[0][:-1] == sent[1][: len(sent[0]) - 1]
    assert sent[1][len(sent[0]) - 1].startswith(sent[0][-1])


@pytest.mark.usefixtures("token")
def test_failed_checks_are_sent_as_findings(service: Server, shell: Shell, database: Path) -> None:
    key = read_database(database)[0].key
    moved = Anchor("prefill", "extend:0+128", {"mha/fa3": 1.0}, {"mha/fa3": 2.0}, "mha/fa3 moved")
    held = Anchor("prefill", "extend:0+256", {"mha/fa3": 1.0}, {"mha/fa3": 1.0})
    with Store.open(database) as store:
        for day, holds in ((20, True), (21, False)):
            at = f"2026-11-{day}T00:00:00.000000+00:00"
            anchors = (held,) if holds else (moved, held)
            store.add_check(Check(key.digest, "580", (("torch", "2"),), at, holds, 0.3, anchors))

    done = shell("db", "push", service.url, "--checks", "--db", str(database))

    assert done.code == 0, done.err
    assert "1 finding sent" in done.err
    (posted,) = service.kept.posted
    found = json.loads(posted.body)
    assert posted.path == "/v1/findings"
    assert (found["point"], found["batch"], found["problem"]) == (
        "prefill", "extend:0+128", "mha/fa3 moved",
    )  # fmt: skip
    assert found["key"]["gpu"] == key.gpu
    assert found["key"]["libraries"] == dict(key.libraries)


@pytest.mark.usefixtures("token")
def test_a_check_that_holds_again_is_no_finding(
    service: Server, shell: Shell, database: Path
) -> None:
    key = read_database(database)[0].key
    anchor = Anchor("prefill", "extend:0+1", {}, {}, "moved")
    with Store.open(database) as store:
        for day, holds in ((20, False), (21, True)):
            at = f"2026-11-{day}T00:00:00.000000+00:00"
            store.add_check(Check(key.digest, "580", (), at, holds, 0.3, (anchor,)))

    assert (
        "0 findings sent" in shell("db", "push", service.url, "--checks", "--db", str(database)).err
    )
    assert service.kept.posted == []


@pytest.mark.usefixtures("token")
def test_tables_are_sent_as_text(service: Server, shell: Shell, database: Path) -> None:
    done = shell("db", "push", service.url, "--tables", "--heads", "16", "--db", str(database))

    assert done.code == 0
    assert "1 new measurement\n" in done.err
    (posted,) = service.kept.posted
    assert posted.path == "/v1/tables"
    assert posted.body.startswith(b"# format = nsa-tune-table ")


def test_nothing_is_sent_unless_it_is_named(service: Server, shell: Shell) -> None:
    done = shell("db", "push", service.url)

    assert done.code == 2
    assert "say what to send" in done.err
    assert service.kept.requests == []


def test_a_push_without_the_right_token_is_refused_in_a_sentence(
    service: Server, shell: Shell, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    log.write_text(f"{_line(1)}\n")

    done = shell("db", "push", service.url, "--log", str(log))

    assert done.code == 1
    assert "needs a token; set NSA_TUNE_TOKEN (401: this token is not known here)" in done.err


@pytest.mark.parametrize("place", ["some.db", "tables.example"])
def test_what_is_no_address_is_named(place: str, shell: Shell) -> None:
    done = shell("db", "push", place, "--tables")

    assert done.code == 2
    assert "is no address of a service" in done.err
