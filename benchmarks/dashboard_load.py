"""A dashboard under attack: clients that ask, beside connections that stay half open.

    python -m benchmarks.dashboard_load [--clients 2000] [--half-open 1500] [--seconds 60]

starts `nsa-tune dashboard` over a table that ships, in a process that may have 1024 descriptors,
and prints one JSON object: the share of requests that were answered, how long they took, and how
much the dashboard wrote into its log. A half-open connection sends a part of a request and no more;
when it is hung up on, it comes again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic

from nsa_tune.db.reader import shipped

__all__ = ["attacked", "main"]

_PATHS = ("/", "/api/live", "/api/report", "/api/measurements")
_DESCRIPTORS = 1024
_PATIENCE_S = 30.0
_PAUSE_S = 2.0
"""Between two requests of a client."""


class _Load:
    """What the clients saw."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._end = monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.times_s: list[float] = []
        self.half_open = 0
        self.hung_up = 0

    async def ask(self, number: int) -> None:
        """One client: a request over a connection of its own, again and again."""
        await asyncio.sleep(number % 100 / 100 * _PAUSE_S)
        turn = number
        while monotonic() < self._end:
            begin = monotonic()
            try:
                outcome = await asyncio.wait_for(self._asked(_PATHS[turn % 4]), _PATIENCE_S)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                outcome = type(error).__name__
            self.outcomes[outcome] += 1
            self.times_s.append(monotonic() - begin)
            turn += 1
            await asyncio.sleep(_PAUSE_S)

    async def _asked(self, path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            line = await reader.readline()
            while await reader.read(1 << 16):
                pass
            return line.split(b" ")[1].decode() if b" " in line else "no answer"
        finally:
            writer.close()

    async def stay_half_open(self) -> None:
        """One connection that sends a part of a request."""
        while monotonic() < self._end:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                self.half_open += 1
                writer.write(b"GET / HTTP/1.1\r\nHost: local")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), max(self._end - monotonic(), 0))
                    self.hung_up += 1
                writer.close()
            await asyncio.sleep(0.1)

    async def run(self, clients: int, half_open: int) -> None:
        """All of them together."""
        silent = [asyncio.create_task(self.stay_half_open()) for _ in range(half_open)]
        await asyncio.sleep(1)
        await asyncio.gather(*(self.ask(number) for number in range(clients - half_open)), *silent)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))


def attacked(clients: int, half_open: int, seconds: float) -> dict[str, object]:
    """Run the load against a dashboard of its own, and say what came of it."""
    table = next(path for path in shipped() if "v4_h128" in path.name)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "nsa_tune.cli", "dashboard", str(table), "--port", "0"]
        with (
            log.open("wb") as stderr,
            subprocess.Popen(command, stderr=stderr, preexec_fn=_limit) as dashboard,
        ):
            try:
                port = _port_in(log)
                begun = log.stat().st_size
                load = _Load(port, seconds)
                asyncio.run(load.run(clients, half_open))
                grown = log.stat().st_size - begun
            finally:
                dashboard.terminate()
    asked, times = sum(load.outcomes.values()), sorted(load.times_s)
    return {
        "clients": clients,
        "half_open": half_open,
        "seconds": seconds,
        "requests": asked,
        "answered_share": round(load.outcomes["200"] / max(asked, 1), 4),
        "outcomes": dict(load.outcomes),
        "median_s": round(times[len(times) // 2], 3),
        "p99_s": round(times[len(times) * 99 // 100], 3),
        "half_open_connections": load.half_open,
        "hung_up_on": load.hung_up,
        "log_bytes_a_minute": round(grown / seconds * 60),
    }


def _port_in(log: Path) -> int:
    end = monotonic() + 60
    while monotonic() < end:
        _, found, rest = log.read_text(errors="replace").partition("http://127.0.0.1:")
        if found and "/" in rest:
            return int(rest.partition("/")[0])
    raise TimeoutError(f"the dashboard did not start: {log.read_text(errors='replace')}")


def main() -> None:
    """Print what the attack came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--half-open", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    print(json.dumps(attacked(given.clients, given.half_open, given.seconds), indent=2))


if __name__ == "__main__":
    main()
