"""Progress of a run for programs: events as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from nsa_tune._errors import UsageError
from nsa_tune.autotune.runner.progress import Incident, Progress, Stored
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Measurement

_SCHEMA = "nsa-tune/event/2"
_log = logging.getLogger(__name__)


class EventProgress(Progress):
    """Writes each event at once. When writing fails, it stops, and the run goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        facts = {**key.as_document(), "digest": key.digest}
        self._write("start", key=facts, batches=batches, skipped=skipped)

    def batch(self, stored: Stored) -> None:
        """Event "batch", with all of its rows, which are stored by now."""
        self._write(
            "batch", done=stored.done, total=stored.total, seconds=round(stored.seconds, 3),
            point=stored.point.name, batch=str(stored.batch), rows=list(map(_row, stored.rows)),
        )  # fmt: skip

    def incident(self, incident: Incident) -> None:
        self._write(incident.kind, text=incident.text)

    def end(self, outcome: str, **facts: object) -> None:
        """Event "end". A run that fails writes none."""
        self._write("end", outcome=outcome, **facts)

    def _write(self, event: str, **facts: Any) -> None:
        document = {"schema": _SCHEMA, "event": event, **facts}
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(document) + "\n")
            self._file.flush()
        except OSError as error:
            self._file = None
            _log.warning("no more events are written: %s", error.strerror)


def _row(row: Measurement) -> dict[str, Any]:
    words = {"arm": row.arm, "status": str(row.status)}
    numbers = {"latency_us": row.latency_us, "low_us": row.low_us, "high_us": row.high_us}
    return {**words, **(numbers if row.latency_us is not None else {"reason": row.reason})}


@contextmanager
def events_into(target: str | None) -> Iterator[EventProgress | None]:
    """Writes events to the file `target`; "-" is stderr, None writes none.

    Raises:
        UsageError: when the file cannot be written.
    """
    if target is None:
        yield None
    elif target == "-":
        yield EventProgress(sys.stderr)
    else:
        file = _opened(Path(target))
        try:
            yield EventProgress(file)
        finally:
            # What could not be written has been told of already.
            with suppress(OSError):
                file.close()


def _opened(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"events cannot be written to {path}: {error.strerror}") from error
