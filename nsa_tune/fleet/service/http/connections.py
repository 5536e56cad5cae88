"""Connections with time limits for a request and for its answer, so that none blocks the server.

A client that connects and sends nothing is disconnected after the limit, or earlier when there are
too many connections. Otherwise half-open connections would use up the process's file descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 100
"""Connections that are taken at once: asyncio writes a page of log for each that it cannot take."""
_MOST = 2048
_KEPT_FREE = 512
"""Descriptors for everything else: databases, bodies of answers, the log, the event loop."""
_BUFFERED = 2**14
_REQUEST_S, _RESPONSE_S = 10.0, 60.0
"""Seconds until a whole request is here, from connecting on, and until its answer is taken."""


def most_connections() -> int:
    """Connections that may be open at once; raises the process's limit of open files if it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST + _KEPT_FREE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft - _KEPT_FREE), 16)


class Limited(H11Protocol):
    """One connection. At most `most` are open at once; beyond, the longest silent one is closed."""

    most = _MOST

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of a request; close the longest silent one of too many."""
        super().connection_made(transport)
        # Of an answer that is sent in blocks, so much is in memory while a client reads slowly.
        transport.set_write_buffer_limits(high=_BUFFERED)
        self._deadline: asyncio.TimerHandle | None = None
        # A dict is in order: those that have waited longest come first.
        self._waiting: dict[Limited, None] = self.server_state.__dict__.setdefault(
            "nsa_tune_waiting", {}
        )
        if len(self.connections) > self.most:
            silent = next(iter(self._waiting), self)
            silent.hang_up()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Read what has come. After a whole request, the time limit of its answer starts."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._done_waiting()
            if not self.cycle.response_complete:
                self.scope["extensions"] = {"nsa_tune.renew": {"renew": self.renew}}
                self.renew()

    def renew(self) -> None:
        """Start the time limit of the answer, or of the next piece of a long one."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.transport.is_closing():
            self._deadline = self.loop.call_later(_RESPONSE_S, self.hang_up)

    def on_response_complete(self) -> None:
        self._done_waiting()
        # The next one may have come already, and be taken up in here.
        self._wait()
        super().on_response_complete()

    def hang_up(self) -> None:
        self._done_waiting()
        if self.transport is not None:
            self.transport.abort()

    def _wait(self) -> None:
        if not self.transport.is_closing():
            self._waiting[self] = None
            self._deadline = self.loop.call_later(_REQUEST_S, self.hang_up)

    def _done_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited_to(most: int) -> type[Any]:
    """The protocol with `most` connections at once."""
    return type("Limited", (Limited,), {"most": most})
