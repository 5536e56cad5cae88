"""A capture that CUDA has given up, and how PyTorch is brought out of it.

If something within a capture waits for the GPU, CUDA refuses to end it. PyTorch then never comes to
an end itself: it lets no other capture allocate from the same pool, releases no memory, and draws
no random numbers. SGLang would fail with its next graphs, or with its first sampled token.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def end_capture(backend: Any) -> None:
    """Bring PyTorch out of a capture that has failed, however far it had come.

    `backend` is the BreakableCudaGraphBackend whose capture it was.
    """
    import torch

    device = torch.cuda.current_device()
    # It raises where PyTorch has come to an end.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, backend._pool)
    # A capture that ends well gives the random numbers back.
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        torch.zeros(1, device=device)
        graph.capture_end()
