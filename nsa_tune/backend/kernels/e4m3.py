"""Rounding to e4m3 inside of Triton kernels, the same on every GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def on_e4m3_grid(value):
    """fp32 `value`, at most 448 in magnitude, to the nearest e4m3 number, ties to even.

    Converting what this returns to e4m3 is exact. Triton's own conversion rounds as the hardware
    does, and in the interpreter truncates subnormals and loses the carry into the exponent.
    """
    # Steps are an eighth of the binade, and from 2**-6 down those of the subnormals. Adding and
    # taking away 1.5 * 2**23 steps leaves whole ones.
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (value + magic) - magic
