"""Random weights of a size that keeps activations near one, for `--load-format dummy`.

SGLang's own dummy weights are within 0.001, which fp8 rounds to zero. Then all scores of the
indexer are equal, all queries read the same keys, and products of zeros draw less power.
"""

from __future__ import annotations

import zlib
from typing import Any

__all__ = ["initialise"]

_FP8_DEVIATION = 64.0
_FP8_MOST = 448.0
_BLOCK = 128


def initialise(model: Any, *_: Any, **__: Any) -> None:
    """Weights [out, in] with a standard deviation of in ** -0.5, norms of one, biases of zero.

    The same for the same model each time. Takes the place of SGLang's function of the same name.
    """
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        if "weight_scale" in name:
            # One number for each block, 128 wide.
            tensor.fill_((tensor.shape[-1] * _BLOCK) ** -0.5 / _FP8_DEVIATION)
        elif torch.finfo(tensor.dtype).bits < 16:
            _fill_fp8(tensor, generator)
        elif tensor.dim() < 2:
            tensor.fill_(0.0 if "bias" in name else 1.0)
        else:
            deviation = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
            tensor.normal_(0, deviation, generator=generator)


def _fill_fp8(tensor: Any, generator: Any) -> None:
    import torch

    # An expert at a time: all of them in 16 bits would need twice the model's memory.
    for matrix in tensor if tensor.dim() == 3 else tensor.unsqueeze(0):
        random = torch.empty(matrix.shape, dtype=torch.float16, device=tensor.device)
        random.normal_(0, _FP8_DEVIATION, generator=generator).clamp_(-_FP8_MOST, _FP8_MOST)
        matrix.copy_(random.to(tensor.dtype))
