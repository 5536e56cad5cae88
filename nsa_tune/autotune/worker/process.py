"""The parent's side of a worker process: starts it, talks to it, says why it died, ends it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pickle import UnpicklingError

from nsa_tune._child_process import command, environment
from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.worker.flight_recorder import Activity, FlightRecorder
from nsa_tune.autotune.worker.messages import (
    CannotContinue,
    MeasureBatch,
    MeasureCeilings,
    Ready,
    Results,
    Setup,
)

_TAIL_BYTES = 4096
_LONGEST_LINE = 200
_EXIT_S = 2.0
"""Time for a worker that closed its connection to exit by itself."""
_KILL_S = 60.0
"""Time for a killed worker to end: the driver may first have to stop a spinning kernel."""


class Died(Exception):
    """The worker died; the text says how."""


class WorkerProcess:
    """One worker, in a session of its own: `kill` also ends the processes that it started."""

    def __init__(self, setup: Setup) -> None:
        self._recorder = FlightRecorder.create()
        self._output = os.memfd_create("nsa-tune-output")
        # Both processes share the file offset. With O_APPEND the worker writes at the end of the
        # file, also after `send` has truncated it.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
        self.connection, theirs = Pipe()
        try:
            self._process = self._spawn(theirs)
        finally:
            theirs.close()
        # A worker that died at once has closed its end of the pipe; `receive` reports it.
        with suppress(ConnectionError):
            self.connection.send(setup)

    def _spawn(self, theirs: Connection) -> subprocess.Popen[bytes]:
        descriptors = (theirs.fileno(), self._recorder.descriptor)
        words = [*map(str, descriptors), str(os.getpid())]
        return subprocess.Popen(
            command("nsa_tune.autotune.worker.main", *words),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=descriptors,
            start_new_session=True,
            env=environment(),
        )

    def activity(self) -> Activity:
        """What the worker is doing, or was when it died."""
        return self._recorder.read()

    def send(self, request: MeasureBatch | MeasureCeilings) -> None:
        """Ask the worker to measure."""
        # So the last line is about this batch, and a verbose library fills no memory.
        os.ftruncate(self._output, 0)
        with suppress(ConnectionError):
            self.connection.send(request)

    def receive(self) -> Ready | Results | CannotContinue:
        """The next message of the worker; blocks until there is one.

        Raises:
            Died: when the worker died instead.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError, UnpicklingError) as error:
            # It may be about to exit: its own exit code says more than our SIGKILL.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self.kill()
            raise Died(self._cause_of_death()) from error
        assert isinstance(message, Ready | Results | CannotContinue)
        return message

    def _cause_of_death(self) -> str:
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        last = self.last_line()
        return f"{how}: {last}" if last else how

    def last_line(self) -> str:
        """The last line that the worker, or a library in it, wrote to stdout or stderr."""
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
        return next((line[:_LONGEST_LINE] for line in reversed(lines) if line), "")

    def kill(self) -> None:
        """Kill the worker and every process that it started, and wait until it has ended.

        Raises:
            MachineUnfit: when it does not end, because it hangs in the driver.
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
        """Kill the worker and free what belongs to it."""
        try:
            self.kill()
        finally:
            self.connection.close()
            self._recorder.close()
            with suppress(OSError):
                os.close(self._output)
