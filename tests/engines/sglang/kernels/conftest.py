"""Where nsa-tune's kernels run in these tests: as in those of the kernels themselves."""

from __future__ import annotations

from tests.backend.conftest import kernel_device

__all__ = ["kernel_device"]
