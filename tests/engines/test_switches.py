"""What a user may write to switch a part on or off."""

from __future__ import annotations

import pytest

from nsa_tune.engines.switches import asked_for, switched_on


@pytest.mark.parametrize(
    ("value", "on", "asked"),
    [
        (None, True, False), ("", True, False), (" ", True, False),
        ("0", False, False), (" No ", False, False), ("OFF", False, False), ("false", False, False),
        ("1", True, True), ("yes", True, True),
    ],
)  # fmt: skip
def test_a_switch(
    monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool, asked: bool
) -> None:
    monkeypatch.delenv("NSA_TUNE_X", raising=False)
    if value is not None:
        monkeypatch.setenv("NSA_TUNE_X", value)

    assert (switched_on("NSA_TUNE_X"), asked_for("NSA_TUNE_X")) == (on, asked)
