"""A shell of tests: runs nsa-tune's commands in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from nsa_tune import cli
from tests.reports.synthetic import H100

GPU = ("--gpu", H100.name)
"""The GPU of the `database` fixture."""


class Result(NamedTuple):
    """How one command ended."""

    code: int
    out: str
    err: str


class Shell:
    """Runs commands in this process."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured = captured

    def __call__(self, *arguments: str) -> Result:
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert isinstance(left.value.code, int)
        return Result(left.value.code, *self._captured.readouterr())
