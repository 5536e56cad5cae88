"""Where the processes of an engine's ranks run, and what is made to fail in the last of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["FAULTS", "VARIABLE", "fail_captures", "one_gpu_variables", "place_ranks"]

FAULTS = {"no-plugin": {"NSA_TUNE_DISABLE": "1"}, "capture": {"NSA_ENGINE_FAULT": "capture"}}
"""What may go wrong on the last rank alone, and the variables by which its process is told."""
VARIABLE = "NSA_ENGINE_FAULT"
_CAPTURED = 2
"""Graphs that are captured before one fails."""


def place_ranks(module: Any, *, ranks: int, one_gpu: bool, fault: str) -> None:
    """Have a module of SGLang that starts ranks start them on the first GPU, or with a fault."""
    original = module.maybe_reindex_device_id

    @contextmanager
    def placed(gpu_id: int) -> Iterator[int]:
        added = FAULTS[fault] if fault and gpu_id == ranks - 1 else {}
        if one_gpu:
            # NCCL refuses two ranks on one GPU of one host, so each is a host of its own.
            added = {**added, "NCCL_HOSTID": f"rank-{gpu_id}"}
        with _environment(added), original(0 if one_gpu else gpu_id) as device:
            yield device

    module.maybe_reindex_device_id = placed


def one_gpu_variables() -> dict[str, str]:
    """Variables by which ranks of one GPU reach each other: through the host's sockets."""
    return {
        "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0",
        # Kernels of both ranks wait for each other, and the GPU runs them in turns.
        "NCCL_MAX_NCHANNELS": "2", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }  # fmt: skip


def fail_captures(module: Any) -> None:
    """Have the plug-in's captures fail, after the first few."""
    graphs = module.DenseGraphs
    original: Callable[..., None] = graphs.capture
    captured = 0

    def capture(self: Any, size: int) -> None:
        nonlocal captured
        # At its end: a rank that failed earlier would leave the others waiting in an all-reduce.
        original(self, size)
        captured += 1
        if captured > _CAPTURED:
            raise RuntimeError("the harness has this capture fail")

    graphs.capture = capture


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """A process that is started within inherits the variables."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
