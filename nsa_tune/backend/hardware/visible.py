"""Which of this host's GPUs CUDA may use, by CUDA_VISIBLE_DEVICES. Standard library only."""

from __future__ import annotations

import os
from itertools import takewhile


def visible_gpus(count: int) -> tuple[int | str, ...]:
    """The numbers or UUIDs of the GPUs that CUDA may use, in its order, on a host with `count`."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(range(count))
    words = [word.strip() for word in named.split(",") if word.strip()]
    gpus = tuple(int(word) if word.isdecimal() else word for word in words)
    # What comes after a number that no GPU has is ignored, and -1 is how all are hidden.
    names = {gpu for gpu in gpus if type(gpu) is str and gpu != "-1"}
    known = tuple(takewhile(lambda gpu: gpu in range(count) or gpu in names, gpus))
    # In a container the driver may count fewer GPUs than the numbers were given for.
    hidden = not known and gpus and type(gpus[0]) is int
    return gpus[:1] if hidden else known
