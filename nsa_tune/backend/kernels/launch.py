"""CUDA kernels that PyTorch compiles by NVRTC, launched with little work for the host."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch

_POOL = ThreadPoolExecutor()


class Kernel:
    """A compiled kernel. PyTorch's own call opens the driver's library anew each time."""

    def __init__(self, source: str, name: str, parameters: str) -> None:
        """Compile `source`, which must not be within a graph's capture.

        `parameters` has a letter for each parameter of the kernel, as in the module struct: P for
        a pointer, i for an int. Pointers come first.
        """
        from torch.cuda._utils import _cuda_load_module

        binary, symbol = _binary(source, name, _capability()).result()
        kernels: Any = _cuda_load_module(binary, [symbol])
        self.compiled = kernels[symbol]
        self.parameters = parameters
        self.launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel


def compile_soon(sources: Sequence[str], name: str) -> None:
    """Begin to compile what `Kernel`s will be made of, at once: NVRTC uses one core for each, and
    keeps nothing for the next process. Graphs may be captured meanwhile."""
    for source in sources:
        _binary(source, name, _capability())


@cache
def _binary(source: str, name: str, capability: str) -> Future[tuple[bytes, str]]:
    """The compiled source, and the kernel's name in it. Whoever asks loads it: the thread that
    compiles has no device."""
    # Not public in PyTorch 2.11, 2.13 and 2.14, where it takes and returns the same.
    from torch.cuda._utils import _nvrtc_compile

    return _POOL.submit(_nvrtc_compile, source, name, capability)


def _capability() -> str:
    """As NVRTC has it, such as "90"."""
    return "{}{}".format(*torch.cuda.get_device_capability())


class Launch:
    """A kernel with its arguments, to be launched as often as is wanted."""

    def __init__(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Pointers are given as numbers, 0 for none."""
        packed = struct.pack(kernel.parameters, *arguments)
        # What is launched points into this memory.
        self._memory = ctypes.create_string_buffer(packed, len(packed))
        count = kernel.parameters.count("P")
        self._pointers = (ctypes.c_uint64 * count).from_buffer(self._memory)
        base, parameters = ctypes.addressof(self._memory), kernel.parameters
        ends = [struct.calcsize(parameters[: i + 1]) for i in range(len(parameters))]
        addresses = (ctypes.c_void_p * len(ends))(
            *[base + end - struct.calcsize(one) for end, one in zip(ends, parameters, strict=True)]
        )
        shape = (blocks, 1, 1, threads, 1, 1, 0)
        self._launch = partial(kernel.launch, kernel.compiled.func, *shape)
        self._addresses = addresses
        self._blocks = blocks

    def point(self, index: int, address: int) -> None:
        """Exchange the pointer that is parameter `index`."""
        self._pointers[index] = address

    def __call__(self) -> None:
        """Launch it on the current stream.

        Raises:
            RuntimeError: when the driver refuses.
        """
        if not self._blocks:
            return
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self._launch(stream, self._addresses, None)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel: error {error}")
