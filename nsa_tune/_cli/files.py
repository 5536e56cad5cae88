"""Files that commands write, and the choice of one table among several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsa_tune._errors import NoTunedData, NsaTuneError, UsageError
from nsa_tune.backend.types.records import Table

__all__ = ["only_table", "write_file"]


def write_file(path: Path, data: str | bytes) -> None:
    """Write `data` to `path`, text as UTF-8.

    Raises:
        NsaTuneError: when it cannot be written.
    """
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        raise NsaTuneError(
            f"{path} cannot be written ({error.strerror}); give another file with --out"
        ) from error


def only_table(found: Sequence[Table], path: Path) -> Table:
    """The one table in `found`, which came from `path`.

    Raises:
        NoTunedData: when there is none.
        UsageError: when there are several; it names their digests.
    """
    if not found:
        raise NoTunedData(f"{path} has no such table; `nsa-tune db list` shows what there is")
    if len(found) > 1:
        digests = ", ".join(table.key.digest for table in found)
        raise UsageError(f"{len(found)} tables match; choose one with --key: {digests}")
    return found[0]
