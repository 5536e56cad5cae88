"""The parent's side of a worker process: start it, listen to it, say why it died, end it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import UnpicklingError
from time import monotonic

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.worker.messages import Answer, Hello, Refusal, Roof, Start, Work
from nsa_tune.autotune.worker.recorder import Moment, Recorder

__all__ = ["Died", "WorkerProcess"]

_TAIL = 4096
_LINE = 200
_LEAVE_S = 2.0
_KILL_S = 60.0
"""A driver may need a while to take a spinning kernel off its GPU."""


class Died(Exception):
    """The worker is gone; the text says how."""


class WorkerProcess:
    """One worker, in a session of its own so that what it starts ends with it."""

    def __init__(self, start: Start) -> None:
        self.started_at = monotonic()
        self._recorder = Recorder.create()
        self._output = os.memfd_create("nsa-tune-output")
        # Both sides share the file's offset: appending, the worker goes on after a truncation.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
        self.connection, theirs = Pipe()
        try:
            self._process = self._spawn(theirs)
        finally:
            theirs.close()
        # A worker that died at once has closed its end; `receive` will say so.
        with suppress(ConnectionError):
            self.connection.send(start)

    def _spawn(self, theirs: Connection) -> subprocess.Popen[bytes]:
        descriptors = (theirs.fileno(), self._recorder.descriptor)
        words = [*map(str, descriptors), str(os.getpid())]
        return subprocess.Popen(
            # -P: a file named like a module in the working directory is not ours.
            [sys.executable, "-u", "-P", "-m", "nsa_tune.autotune.worker.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=descriptors,
            start_new_session=True,
            env=_environment(),
        )

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def moment(self) -> Moment:
        """What the worker is doing, or was when it died."""
        return self._recorder.read()

    def send(self, work: Work | Roof) -> None:
        """Hand over a batch, or ask for the ceilings."""
        # Last words are about this batch, and a library that chatters fills no memory.
        os.ftruncate(self._output, 0)
        with suppress(ConnectionError):
            self.connection.send(work)

    def receive(self) -> Hello | Answer | Refusal:
        """The message that has come.

        Raises:
            Died: when there will be none.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError, UnpicklingError) as error:
            # It is on its way out: its own exit code says more than ours would.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
            self.kill()
            raise Died(self._obituary()) from error
        assert isinstance(message, Hello | Answer | Refusal)
        return message

    def _obituary(self) -> str:
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        last = self.last_words()
        return f"{how}: {last}" if last else how

    def last_words(self) -> str:
        """The last line that the worker or a library in it wrote."""
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, _TAIL, max(size - _TAIL, 0))
        lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
        return next((line[:_LINE] for line in reversed(lines) if line), "")

    def kill(self) -> None:
        """End the worker and everything that it started, and wait until it is gone.

        Raises:
            MachineUnfit: when the driver does not let go of it.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            raise MachineUnfit(
                f"worker {self._process.pid} hangs in the driver and cannot be ended; "
                "see nsa-tune doctor, and reset the GPU"
            ) from None

    def close(self) -> None:
        """Kill the worker and give everything back."""
        try:
            self.kill()
        finally:
            self.connection.close()
            self._recorder.close()
            with suppress(OSError):
                os.close(self._output)


def _environment() -> dict[str, str]:
    """Ours, with the import path of this process."""
    paths = [str(Path(path).absolute()) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
