"""Addresses of tables: the database, its tables as texts, and uploads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from nsa_tune.fleet.service.http.messages import (
    answer,
    body_file,
    streamed,
    tagged,
    target_in,
)
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.tables.bodies import of_keys, text_of
from nsa_tune.fleet.service.tables.index import Entry
from nsa_tune.fleet.service.tables.uploads import MOST_BYTES
from nsa_tune.reports.dashboard.access import unchanged

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_DATABASE = "application/vnd.sqlite3"


class TableEndpoints:
    """What the addresses of tables answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def database(self, request: Request) -> Response:
        """The whole database as one file, or one with the tables that the query names."""
        if not request.url.query:
            return streamed(request, await self._service.copy(), _DATABASE)
        target = target_in(request)
        name, held_of = f"tables of {target.name}", self._service.held_of
        entries = await held_of(target.name)
        if not entries:
            # For a GPU that nobody has measured, those of the others may answer.
            entries = await held_of((None, *target.name[1:]))
            name = f"tables of {target.name[1:]}"
        # Names that somebody made up have one body together.
        name = name if entries else "no table"
        # The tag is the version, not the content's hash: whoever asks again after a restart is
        # answered without a body being made.
        version = sha256("".join(entry.version for entry in entries).encode()).hexdigest()
        if same := unchanged(request, version):
            return same
        make = partial(of_keys, self._service.database, entries)
        body = await self._service.body(name, version, make)
        return streamed(request, body, _DATABASE, body.version)

    async def tables(self, request: Request) -> Response:
        """What tables there are, each with the address of its text; the query may name some."""
        held = await self._service.held()
        doubtful = await self._service.in_state(self._service.demand.doubtful)
        if request.url.query:
            document = _listed(held.of(target_in(request).name), doubtful)
            return tagged(request, document.encode(), "application/json")

        def make(path: Path) -> None:
            path.write_text(_listed(held.entries, doubtful), "utf-8", "backslashreplace")

        version = f"{held.version} {json.dumps(doubtful)}"
        body = await self._service.body("list", version, make)
        return streamed(request, body, "application/json")

    async def table(self, request: Request) -> Response:
        """The text of one table."""
        version = request.path_params["version"]
        for entry in (await self._service.held()).entries:
            if entry.version == version:
                make = partial(text_of, self._service.database, entry)
                name = f"text of {entry.key.digest}"
                body = await self._service.large_body(name, version, make)
                return streamed(request, body, "text/tab-separated-values")
        raise HTTPException(
            404, "there is no table with this content; it may have changed: see /v1/tables"
        )

    async def upload(self, request: Request) -> Response:
        """Merge a text table."""
        async with body_file(request, self._service, MOST_BYTES) as path:
            merged = await self._service.upload(path)
        return answer({"added": merged.added, "known": merged.known})


def _listed(entries: Sequence[Entry], doubtful: Mapping[str, Sequence[str]]) -> str:
    tables: list[dict[str, Any]] = [
        {
            "digest": entry.key.digest,
            **entry.key.as_document(),
            "rows": entry.measurements,
            "measured_at": entry.measured_at,
            "url": f"/v1/tables/{entry.version}",
            "doubtful": doubtful.get(entry.key.digest, []),
        }
        for entry in entries
    ]
    return json.dumps({"tables": tables}, ensure_ascii=False)
