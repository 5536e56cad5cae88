"""What PyTorch can do again after a capture that CUDA has given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.whole_pass.failed_capture import end_capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _capture(pool: Any, *, waits: bool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        try:
            numbers = torch.zeros(1000, device="cuda") + 1
            if waits:
                numbers.sum().item()
        finally:
            graph.capture_end()
    return graph


@pytest.mark.parametrize("waits", [True, False])
def test_the_next_graph_is_captured_into_the_same_pool(waits: bool) -> None:
    """Whether the capture had come to its end or not."""
    pool = torch.cuda.graph_pool_handle()
    kept = _capture(pool, waits=False)
    if waits:
        with pytest.raises(RuntimeError):
            _capture(pool, waits=True)

    end_capture(SimpleNamespace(_pool=pool))

    _capture(pool, waits=False).replay()
    kept.replay()
    assert float(torch.rand(100, device="cuda").max()) > 0
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
