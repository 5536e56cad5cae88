"""Fixtures of the backend's tests."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def kernel_device() -> torch.device:
    """Where Triton kernels run: a GPU, or a CPU under Triton's interpreter."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
