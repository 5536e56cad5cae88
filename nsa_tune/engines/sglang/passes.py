"""What a forward pass of SGLang is to a table: whether one decides for it, and its batch."""

from __future__ import annotations

from typing import Any


def is_plain_extend(forward_batch: Any) -> bool:
    """Whether the pass is a prefill and nothing else.

    Halves of a batch must agree with each other, and a mixed batch with decoding.
    """
    mode = forward_batch.forward_mode
    return (
        mode is type(mode).EXTEND
        and not forward_batch.tbo_children
        and forward_batch.tbo_parent_token_range is None
    )
