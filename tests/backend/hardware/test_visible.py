"""CUDA_VISIBLE_DEVICES, as CUDA reads it."""

from __future__ import annotations

import pytest

from nsa_tune.backend.hardware.visible import visible_gpus


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, (0, 1)), ("", ()), ("1,0", (1, 0)), ("-1", ()), ("1,-1,0", (1,)),
        # What comes after a number that no GPU has is ignored.
        ("0,9,1", (0,)), ("GPU-abc,0", ("GPU-abc", 0)),
        # A container may count fewer GPUs than the numbers were given for.
        ("3", (3,)),
    ],
)  # fmt: skip
def test_gpus_of_a_host_with_two(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: tuple[int | str, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)

    assert visible_gpus(2) == found
