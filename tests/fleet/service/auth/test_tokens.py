"""Tokens: shown once, stored hashed, and good until they are revoked."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nsa_tune._errors import (
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreNewer,
    StoreReadOnly,
    UnknownName,
    UsageError,
)
from nsa_tune.fleet.service.auth.tokens import Role, Tokens
from nsa_tune.fleet.service.state import State, state_path
from tests.shell import Shell


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "some.service.db"


def test_a_token_opens_until_it_is_revoked(path: Path) -> None:
    with State.open(path) as state:
        tokens = Tokens(state)
        secret, other = tokens.add("gpu-7", Role.SUBMIT), tokens.add("boss", Role.ADMIN)

        found = tokens.find(secret)
        assert found is not None
        assert (found.name, found.role) == ("gpu-7", Role.SUBMIT)
        assert tokens.find(secret + "x") is None
        assert tokens.find("") is None
        tokens.revoke("gpu-7")
        assert tokens.find(secret) is None
        assert tokens.find(other) is not None


def test_what_another_process_changes_counts_at_once(path: Path) -> None:
    with State.open(path) as here, State.open(path) as there:
        tokens = Tokens(here)
        assert tokens.find("x") is None
        secret = Tokens(there).add("late", Role.READ)
        assert tokens.find(secret) is not None
        Tokens(there).revoke("late")
        assert tokens.find(secret) is None


def test_the_file_has_no_token_and_is_nobody_elses(path: Path) -> None:
    with State.open(path) as state:
        secret = Tokens(state).add("gpu-7", Role.SUBMIT)
    assert len(secret) > 40
    assert secret.encode() not in path.read_bytes()
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize("needed", Role)
def test_each_role_allows_what_those_before_it_do(needed: Role) -> None:
    assert [role.allows(needed) for role in Role] == [
        list(Role).index(role) >= list(Role).index(needed) for role in Role
    ]
    assert not Role.READ.allows(Role.SUBMIT)
    assert not Role.SUBMIT.allows(Role.ADMIN)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65, "é"])
def test_a_name_is_a_plain_word(name: str, path: Path) -> None:
    with State.open(path) as state, pytest.raises(UsageError, match="no name for a token"):
        Tokens(state).add(name, Role.READ)


def test_names_are_taken_once(path: Path) -> None:
    with State.open(path) as state:
        Tokens(state).add("a", Role.READ)
        with pytest.raises(UsageError, match="there is a token a already"):
            Tokens(state).add("a", Role.ADMIN)
        with pytest.raises(UnknownName, match="unknown token 'b'; use one of: a"):
            Tokens(state).revoke("b")


def test_another_database_is_left_alone(database: Path, path: Path) -> None:
    before = database.read_bytes()
    with pytest.raises(StoreCorrupt, match="not one of `nsa-tune serve`"):
        State.open(database)
    assert database.read_bytes() == before
    with pytest.raises(StoreMissing, match="`nsa-tune serve` makes it"):
        State.open(path, create=False)


def test_a_file_that_others_could_read_is_closed_to_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    State.open(path).close()
    path.chmod(0o644)
    with State.open(path) as state:
        Tokens(state).add("a", Role.READ)
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert "could be read by others" in caplog.text


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    State.open(path).close()
    link = tmp_path / "link.service.db"
    link.symlink_to(path)
    with pytest.raises(StoreReadOnly, match="is a link"):
        State.open(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_not_trusted(path: Path) -> None:
    State.open(path).close()
    os.chown(path, 22222, -1)
    with pytest.raises(StoreError, match="belongs to another user"):
        State.open(path)


def test_a_newer_service_wrote_it(path: Path) -> None:
    with State.open(path) as state, state.writing() as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreNewer, match="upgrade"):
        State.open(path)


@pytest.mark.parametrize("place", ["/dev/full", "typo/deep/tables.db"])
def test_a_token_is_made_only_where_a_database_can_be(
    place: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = shell("token", "add", "x", "--db", place)
    assert refused.code == 2
    assert refused.out == ""
    assert not list(tmp_path.iterdir())
    assert not Path("/dev/full.service.db").exists()


def test_a_token_beside_no_database_says_so(shell: Shell, tmp_path: Path) -> None:
    added = shell("token", "add", "x", "--db", str(tmp_path / "typo.db"))
    assert added.code == 0
    assert f"there is no database {tmp_path / 'typo.db'} yet" in added.err


def test_tokens_on_the_command_line(shell: Shell, tmp_path: Path) -> None:
    place = "--db", str(tmp_path / "t.db")
    assert shell("token", "list", *place).code == 1
    added = shell("token", "add", "gpu-7", "--role", "submit", *place)
    assert (added.code, added.out.count("\n")) == (0, 1)
    with State.open(state_path(tmp_path / "t.db")) as state:
        found = Tokens(state).find(added.out.strip())
    assert found is not None
    assert found.name == "gpu-7"
    listed = shell("token", "list", "--json", *place)
    assert '"name": "gpu-7", "role": "submit"' in listed.out
    assert added.out.strip() not in listed.out
    assert "gpu-7  submit" in shell("token", "list", *place).out
    assert shell("token", "revoke", "gpu-7", *place).code == 0
    assert shell("token", "revoke", "gpu-7", *place).code == 2
    assert "there are no tokens" in shell("token", "list", *place).err
