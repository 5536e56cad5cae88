"""A service on a free port of this machine, for tests: in a thread, or as a process."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from nsa_tune.fleet.service.auth.tokens import Role, Tokens
from nsa_tune.fleet.service.http.server import config_of
from nsa_tune.fleet.service.service import Service
from nsa_tune.fleet.service.state import State, state_path
from tests.serving import Answer, answer_of, serving

_ROOT = Path(__file__).parents[3]


def tokens_of(database: Path) -> dict[Role, str]:
    """A new token of each role for the service of `database`, called like its role."""
    with State.open(state_path(database)) as state:
        tokens = Tokens(state)
        return {role: tokens.add(str(role), role) for role in Role}


class Served:
    """A service that answers, and a token of each role."""

    def __init__(self, port: int, tokens: Mapping[Role, str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.tokens = tokens

    def ask(
        self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, *,
        role: Role | None = Role.READ, token: str | None = None, **headers: str,
    ) -> Answer:  # fmt: skip
        """What it answers to somebody with `token`, or else with a token of `role`."""
        given = token if token is not None else self.tokens[role] if role is not None else None
        if given is not None:
            headers["Authorization"] = f"Bearer {given}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return answer_of(self.port, method, path, headers, data)

    def get(self, path: str, **more: Any) -> Answer:
        """What a GET answers."""
        return self.ask("GET", path, **more)

    def post(self, path: str, body: bytes | Mapping[str, Any], **more: Any) -> Answer:
        """What a POST answers, by default with the role "submit"."""
        return self.ask("POST", path, body, **{"role": Role.SUBMIT, **more})


@contextmanager
def served(database: Path, **settings: Any) -> Iterator[Served]:
    """A service in a thread of its own."""
    tokens = tokens_of(database)
    with (
        closing(Service(database, **settings)) as service,
        serving(config_of(service)) as port,
    ):
        yield Served(port, tokens)


class Process:
    """`nsa-tune serve` as a process; `port` 0 takes a free one."""

    def __init__(self, database: Path, *options: str, port: int = 0, file_bytes: int = 0) -> None:
        """With `file_bytes` its files may not grow beyond that, as on a full disk."""

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        self._process = subprocess.Popen(
            [sys.executable, "-m", "nsa_tune.cli", "serve", "--db", str(database),
             "--port", str(port), *options],
            stderr=subprocess.PIPE, text=True, cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            preexec_fn=limited if file_bytes else None,
        )  # fmt: skip
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line + self._process.stderr.read()
        self.port = int(found[1])

    @property
    def peak_bytes(self) -> int:
        """Of memory, since it began."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None
        return 1024 * int(peak[1])

    def kill(self) -> None:
        """SIGKILL: it has no moment to tidy up."""
        self._process.kill()
        self._process.communicate()

    def stop(self) -> tuple[int, str]:
        """SIGTERM; its exit code, and what it said."""
        self._process.terminate()
        _, said = self._process.communicate(timeout=120)
        return self._process.returncode, said

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                self.kill()


def until(happened: Callable[[], bool]) -> None:
    """Wait for it, 30 s at most."""
    for _ in range(600):
        if happened():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not happen within 30 s")
