"""Tokens: who may do what. A token is shown once, when it is made; its hash is stored."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from nsa_tune._errors import UnknownName, UsageError
from nsa_tune.fleet.service.state import State

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BYTES = 32
"""Of randomness: as nobody can guess or try so many, a plain hash of a token suffices."""


class Role(StrEnum):
    """What a token allows; each allows what those before it do."""

    READ = "read"
    """Pull tables, see the dashboard, ask for a table."""
    SUBMIT = "submit"
    """Push tables, logs and findings; take jobs."""
    ADMIN = "admin"
    """Approve, add and cancel jobs."""

    def allows(self, needed: Role) -> bool:
        """Whether this role may do what `needed` is needed for."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Token:
    """A token without its secret."""

    name: str
    role: Role
    created_at: str


class Tokens:
    """The tokens in a state; safe in several threads."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, name: str, role: Role) -> str:
        """A new token of this name; nothing shows it again.

        Raises:
            UsageError: when there is one of that name, or it is no name.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a token: use letters, digits and . _ -, at most 64"
            )
        secret = f"nst_{secrets.token_urlsafe(_BYTES)}"
        row = [name, str(role), _hash(secret), datetime.now(UTC).isoformat(timespec="seconds")]
        with self._state.writing() as connection:
            if connection.execute("SELECT 1 FROM tokens WHERE name = ?", [name]).fetchone():
                raise UsageError(f"there is a token {name} already; revoke it, or choose a name")
            connection.execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", row)
        return secret

    def all(self) -> list[Token]:
        """Every token, by name."""
        with self._state.reading() as connection:
            rows = connection.execute("SELECT name, role, created_at FROM tokens ORDER BY name")
            return [Token(name, Role(role), created_at) for name, role, created_at in rows]

    def revoke(self, name: str) -> None:
        """Forget the token of this name: from now on it opens nothing.

        Raises:
            UnknownName: when there is none.
        """
        with self._state.writing() as connection:
            count = connection.execute("DELETE FROM tokens WHERE name = ?", [name]).rowcount
        if not count:
            raise UnknownName.of("token", name, [token.name for token in self.all()])

    def find(self, secret: str) -> Token | None:
        """Whose token `secret` is; None for nobody's. What `add` and `revoke` did in another
        process counts at once."""
        query = "SELECT name, role, created_at FROM tokens WHERE hash = ?"
        with self._state.reading() as connection:
            row = connection.execute(query, [_hash(secret)]).fetchone()
        return None if row is None else Token(row[0], Role(row[1]), row[2])


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
