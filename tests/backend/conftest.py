"""Fixtures of the backend's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.backend.machine import set_up


@pytest.fixture
def kernel_device() -> torch.device:
    """Where Triton kernels run: a GPU, or a CPU under Triton's interpreter."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process believes that it runs on the machine of tests."""
    set_up(monkeypatch, tmp_path)
