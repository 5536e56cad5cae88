"""The child's side of a worker process: measures what its parent sends, until that one is gone.

Run as ``python -m nsa_tune.autotune.worker.main CONNECTION RECORDER PARENT``: two inherited
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
from nsa_tune.autotune.worker.messages import Refusal, Roof
from nsa_tune.autotune.worker.recorder import Recorder

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve the parent that started this process."""
    connection_fd, recorder_fd, parent = map(int, arguments)
    _die_with(parent)
    for descriptor in (connection_fd, recorder_fd):
        # A compiler that an arm starts must not keep the connection open.
        os.set_inheritable(descriptor, False)
    # What fails is told to the parent; on stderr it would stand for a dying library's last words.
    logging.getLogger("nsa_tune").setLevel(logging.CRITICAL)
    # The terminal's Ctrl-C is for the parent, which ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(connection_fd) as connection:
        try:
            _serve(connection, Recorder(recorder_fd))
        except (EOFError, ConnectionError):
            return
        except NsaTuneError as error:
            connection.send(Refusal(error))


def _serve(connection: Connection, recorder: Recorder) -> None:
    start = connection.recv()
    # Not before the parent has said something: this import takes seconds.
    from nsa_tune.autotune.bench.bench import Bench

    bench = Bench(start, recorder)
    connection.send(bench.hello)
    while True:
        wanted = connection.recv()
        connection.send(bench.ceilings() if isinstance(wanted, Roof) else bench.measure(wanted))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, however that one ended.

    A worker that waits for its next batch sees the connection close; one that hangs does not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
