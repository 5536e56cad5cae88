"""CUDA kernels that PyTorch compiles by NVRTC, launched with little work for the host."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

__all__ = ["Kernel"]


class Kernel:
    """A compiled kernel. PyTorch's own call opens the driver's library anew each time."""

    def __init__(self, source: str, name: str, parameters: str) -> None:
        """Compile `source`, which must not be within a graph's capture.

        `parameters` has a letter for each parameter of the kernel, as in the module struct: P for
        a pointer, i for an int.
        """
        # Not public in PyTorch 2.11 and 2.13, where it takes and returns the same.
        self._compiled = torch.cuda._compile_kernel(source, name)
        self._function = self._compiled.func
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._pack = struct.Struct(parameters).pack
        self._offsets = offsets_of(parameters)
        self._pointers = ctypes.c_void_p * len(parameters)

    def __call__(self, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch it on the current stream; pointers are given as numbers, 0 for none.

        Raises:
            RuntimeError: when the driver refuses.
        """
        if not blocks:
            return
        values = self._pack(*arguments)
        memory = ctypes.create_string_buffer(values, len(values))
        base = ctypes.addressof(memory)
        pointers = self._pointers(*[base + offset for offset in self._offsets])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        error = self._launch(self._function, *grid, *block, 0, stream, pointers, None)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel: error {error}")


def offsets_of(parameters: str) -> tuple[int, ...]:
    """Where each of `parameters` lies when they are packed."""
    return tuple(
        struct.calcsize(parameters[: i + 1]) - struct.calcsize(letter)
        for i, letter in enumerate(parameters)
    )
