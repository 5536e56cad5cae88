"""Opening files that somebody else may have made: regular ones only, and never without end.

A pipe in place of a file would be waited for, and a device could be read for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class TooLong(ValueError):
    """A file or a line is larger than anything that belongs there; the text says which."""


def open_regular(path: Path) -> BinaryIO:
    """The file `path`, open for reading.

    Raises:
        OSError: when it cannot be opened, or is a directory, a pipe or a device.
    """
    try:
        # Without O_NONBLOCK a pipe is waited for until somebody writes into it.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it is no path ({error})") from None
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    raise OSError(errno.EINVAL, "it is not a regular file")


def read_whole(file: BinaryIO, most_bytes: int) -> bytes:
    """The rest of `file`.

    Raises:
        TooLong: when it has more than `most_bytes`.
        OSError: when it cannot be read.
    """
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLong(f"it has more than {most_bytes} bytes")
    return data


def lines_of(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """The lines of `file`, each with its end.

    Raises:
        TooLong: when one has more than `most_bytes`.
        OSError: when it cannot be read.
    """
    number = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise TooLong(f"line {number} has more than {most_bytes} bytes")
        yield line
