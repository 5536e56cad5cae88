"""A log that visitors cannot fill: ten lines a minute, and how many were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nsa_tune.backend.types.counted import counted

_MOST, _PERIOD_S = 10, 60.0


class Sparing(logging.Filter):
    """Passes ten records a minute; the first of the next minute says how many did not pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun, self._passed, self._left_out = -_PERIOD_S, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        now = self._clock()
        if now - self._begun >= _PERIOD_S:
            if self._left_out:
                text = f"{record.getMessage()} ({counted(self._left_out, 'line')} left out before)"
                record.msg, record.args = text, None
            self._begun, self._passed, self._left_out = now, 0, 0
        if self._passed >= _MOST:
            self._left_out += 1
            return False
        self._passed += 1
        return True


@contextmanager
def sparing(*names: str) -> Iterator[None]:
    """Spare the loggers with these names; all of them together pass so many."""
    rule = Sparing()
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(rule)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(rule)
