"""Addresses of servers, as NSA_TUNE_DB and `--db` may have them in place of a path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

from nsa_tune._errors import UsageError

DATABASE = "/v1/database"
"""Where a service has its database; meant where an address has no path."""

# A Path of an address has lost a slash.
_ADDRESS = re.compile("(https?):/{1,2}(?=[^/])", re.IGNORECASE)
_PIN = re.compile("sha256=([0-9a-fA-F]{64})")
_ODD = re.compile(r"[^\x21-\x7e]")
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """One address."""

    url: str
    """Without the part behind "#"."""
    shown: str
    """Without its query, which may hold a secret; for messages."""
    sha256: str
    """What the content must be, in lower case; "" where the address does not say."""
    readable: bool
    """Others can read and change what passes: no TLS, and another machine."""

    @classmethod
    def of(cls, text: str) -> Address:
        """The address that `text` is.

        `#sha256=HEX` behind it says what the content must be. Without a path it means a service's
        database.

        Raises:
            UsageError: when it is none; the message does not repeat a password.
        """
        try:
            parts = urlsplit(text)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"the address of a database is wrong: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise UsageError(
                "the address of a database has a user or a password in it; take it out, and put "
                "the token into NSA_TUNE_TOKEN"
            )
        if not host or _ODD.search(text):
            raise UsageError(f"{text!r} is no address; write it like https://tables.example")
        pin = _PIN.fullmatch(parts.fragment)
        if parts.fragment and pin is None:
            raise UsageError(
                f"#{parts.fragment} behind an address means nothing; write #sha256= and 64 digits"
            )
        path = DATABASE if parts.path in ("", "/") else parts.path
        readable = parts.scheme.lower() == "http" and host not in _LOCAL
        url = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        shown = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        return cls(url, shown, pin[1].lower() if pin else "", readable)

    @property
    def is_service(self) -> bool:
        """Whether it is the database of a service, and not just a file on a web server."""
        return urlsplit(self.url).path == DATABASE

    def of_table(self, fields: Mapping[str, object]) -> Address:
        """The address of only the tables with these `fields` of a key, if it is a service."""
        if not self.is_service or self.sha256 or urlsplit(self.url).query:
            return self
        return replace(self, url=f"{self.url}?{urlencode(fields)}")

    @property
    def server(self) -> str:
        """The URL without its path."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc, "", "", ""))


def address_in(place: str | Path) -> Address | None:
    """The address that `place` is; None where it is a path.

    Raises:
        UsageError: when it begins like an address and is none.
    """
    text = str(place)
    begin = _ADDRESS.match(text)
    return None if begin is None else Address.of(f"{begin[1].lower()}://{text[begin.end() :]}")
