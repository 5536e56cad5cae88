"""The variables NSA_TUNE_...: what they mean, and that a wrong value is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune.backend.dispatch.environment import Environment
from tests.backend.fake_point import FAKE

_POINTS = {FAKE.name: FAKE}


def _read(**variables: str) -> Environment:
    return Environment.read(
        _POINTS, {f"NSA_TUNE_{name}": value for name, value in variables.items()}
    )


def test_nothing_is_set_by_default() -> None:
    assert _read() == Environment()
    assert _read(DISABLE="", ASSERT_HIT="0", FORCE="") == Environment()


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_flags_are_read(value: str) -> None:
    found = _read(DISABLE=value, ASSERT_HIT=value, DEMOTE_FAILED=value)

    assert found.disabled
    assert found.assert_hit
    assert found.demote_failed


def test_an_arm_can_be_forced_for_a_point() -> None:
    assert _read(FORCE="fake=mla/wide").forced == {"fake": "mla/wide"}


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("DISABLE", "maybe", "set it to 1 or 0"),
        ("ASSERT_HIT", "2", "set it to 1 or 0"),
        ("DEMOTE_FAILED", "failed", "set it to 1 or 0"),
        ("FORCE", "mla/wide", "write POINT=ARM"),
        ("FORCE", "prefil=mla/wide", "a point of: fake"),
        ("FORCE", "fake=mla/wider", "no arm 'mla/wider'; use one of: mha/dense, mla/wide"),
        ("FORCE", "fake=mla/wide,fake=mha/dense", "forces two arms of fake"),
    ],
)
def test_a_wrong_value_names_the_variable_and_the_value(name: str, value: str, clause: str) -> None:
    with pytest.raises(UsageError) as caught:
        _read(**{name: value})

    assert f"NSA_TUNE_{name} is {value!r}" in str(caught.value)
    assert clause in str(caught.value)


def test_files_that_are_not_there_are_named_and_do_not_stop_the_engine(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        _read(DB=str(tmp_path / "no.db"), LOG=str(tmp_path / "no" / "log.jsonl"))

    assert f"NSA_TUNE_DB is {str(tmp_path / 'no.db')!r}" in caplog.text
    assert f"NSA_TUNE_LOG is {str(tmp_path / 'no' / 'log.jsonl')!r}" in caplog.text
