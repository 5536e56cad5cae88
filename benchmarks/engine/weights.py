"""Random weights with which rounding errors stay small, for `--load-format dummy`.

SGLang's own dummy weights are within 0.001, which fp8 rounds to zero. Then all scores of the
indexer are equal, all queries read the same keys, and products of zeros draw less power.

Weights that are all independent make a chaotic model instead: a rounding error that moves one token
to another expert changes that token as a whole, and each layer makes the difference larger. So the
experts of a layer are alike, as those of a trained model are that start from one another, and what
a layer adds is small beside what it is added to.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

__all__ = ["index_by_content", "initialise"]

_ROTATED = 64
_FP8_DEVIATION = 64.0
_FP8_MOST = 448.0
_BLOCK = 128
_EXPERTS_DIFFER = 0.2
"""The part of an expert's weights that is its own, as a share of their standard deviation."""
_QUERY_GAIN = 1.3
"""Scores then have a standard deviation of 2.4, and a query reads 10 of 4096 keys or so."""
_ADDED = ("o_proj", "down_proj", "w2_weight")
"""Matrices whose products are added to the hidden states."""


def initialise(model: Any, *_: Any, **__: Any) -> None:
    """Weights [out, in] with a standard deviation of in ** -0.5, norms of one, biases of zero.

    Products that are added to the hidden states are smaller, by the root of how many there are;
    queries are a little larger. The same for the same model each time. Takes the place of SGLang's
    function of the same name.
    """
    import torch

    tensors = model.state_dict()
    layers = _layers(tensors)
    for name, tensor in tensors.items():
        if not torch.is_floating_point(tensor):
            continue
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(zlib.crc32(name.encode()) + _shard(name))
        if "weight_scale" in name:
            # One number for each block, 128 wide.
            width = tensor.shape[-1] * _BLOCK
            tensor.fill_(_gain(name, layers) * width**-0.5 / _FP8_DEVIATION)
        elif torch.finfo(tensor.dtype).bits < 16:
            _fill(tensor, _FP8_DEVIATION, generator)
        elif tensor.dim() < 2:
            tensor.fill_(0.0 if "bias" in name else 1.0)
        else:
            deviation = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
            _fill(tensor, _gain(name, layers) * deviation, generator)


def index_by_content(model: Any, on: bool) -> None:
    """Whether indexers' keys lack their rotated part: like tokens then select alike wherever they
    stand. In place, as graphs read these weights."""
    import torch

    with torch.inference_mode():
        for name, tensor in model.state_dict().items():
            if "indexer.k_norm.weight" in name:
                tensor[:_ROTATED] = 1.0 - on


def _shard(name: str) -> int:
    """This rank, for what is divided by token: else a token of each rank would score the same."""
    import torch

    split = "lm_head" in name and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if split else 0


def _layers(names: Any) -> int:
    found = (re.search(r"layers\.(\d+)\.", name) for name in names)
    return 1 + max((int(one[1]) for one in found if one), default=0)


def _gain(name: str, layers: int) -> float:
    if any(one in name for one in _ADDED):
        return float((2 * layers) ** -0.5)
    return _QUERY_GAIN if "q_b_proj" in name else 1.0


def _fill(tensor: Any, deviation: float, generator: Any) -> None:
    """Normal numbers; matrices of a tensor [experts, out, in] have most of theirs in common."""
    import torch

    most = _FP8_MOST if torch.finfo(tensor.dtype).bits < 16 else float("inf")
    # A matrix at a time: all experts in 16 bits would need twice the model's memory.
    matrices = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    for matrix, values in zip(matrices, _random(tensor, deviation, generator), strict=True):
        matrix.copy_(values.clamp_(-most, most).to(tensor.dtype))


def _random(tensor: Any, deviation: float, generator: Any) -> Iterator[Any]:
    import torch

    def normal(part: float) -> Any:
        values = torch.empty(tensor.shape[-2:], dtype=torch.float32, device=tensor.device)
        return values.normal_(0, deviation * part, generator=generator)

    if tensor.dim() < 3:
        yield normal(1.0)
        return
    common = normal((1 - _EXPERTS_DIFFER**2) ** 0.5)
    for _ in range(tensor.shape[0]):
        yield common + normal(_EXPERTS_DIFFER)
