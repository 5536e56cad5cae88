"""A worker process: measures what its parent asks for, until the parent is gone.

Run as ``python -m nsa_tune.autotune.worker.main CONNECTION RECORDER PARENT``: two inherited file
descriptors and the parent's process id.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.worker.flight_recorder import FlightRecorder
from nsa_tune.autotune.worker.messages import CannotContinue, MeasureCeilings

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve the parent that started this process."""
    connection_fd, recorder_fd, parent = map(int, arguments)
    _die_with(parent)
    for descriptor in (connection_fd, recorder_fd):
        # A compiler that an arm starts must not keep the connection open.
        os.set_inheritable(descriptor, False)
    # Errors go to the parent as messages. The parent quotes stderr's last line when this process
    # dies, and that line should be the failing library's.
    logging.getLogger("nsa_tune").setLevel(logging.CRITICAL)
    # Ctrl-C reaches every process of the terminal, but the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(connection_fd) as connection:
        try:
            _serve(connection, FlightRecorder(recorder_fd))
        except (EOFError, ConnectionError):
            return
        except NsaTuneError as error:
            connection.send(CannotContinue(error))


def _serve(connection: Connection, recorder: FlightRecorder) -> None:
    setup = connection.recv()
    # Imported only now, because it loads torch, which takes seconds.
    from nsa_tune.autotune.worker.server import MeasurementServer

    server = MeasurementServer(setup, recorder)
    connection.send(server.ready)
    while True:
        message = connection.recv()
        if isinstance(message, MeasureCeilings):
            connection.send(server.measure_ceilings())
        else:
            connection.send(server.measure(message))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, however the parent ended.

    An idle worker sees its connection close, but one that hangs in a kernel does not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
