"""Flags: values of an engine's own options that hold for every pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.batch import Batch

PREFILL_FLAG = "--dsa-prefill-backend"
DECODE_FLAG = "--dsa-decode-backend"
THRESHOLD = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
FLAGGED = frozenset({"sparse_prefill", "decode", "prefill_path"})
"""Questions that flags answer."""
_PREFILL = (
    "flashmla_sparse", "flashmla_kv", "fa3", "tilelang", "trtllm", "flashmla_sparse_q8",
)  # fmt: skip
_DECODE = ("flashmla_kv", "flashmla_sparse", "fa3", "tilelang", "trtllm")
"""Kernels that SGLang 0.5.23 takes as values (arg_groups/fields/exec_.py:299, 341)."""
_THRESHOLDS = 8
"""Values tried for the longest sequence with MHA, evenly from 0 to index_topk."""


class Flags(NamedTuple):
    """Values for one kind of pass; None leaves a flag at its default."""

    kernel: str | None = None
    threshold: int | None = None
    """The longest sequence that still takes MHA."""

    def applied(self, engine: Mapping[str, str | None], batch: Batch) -> dict[str, str | None]:
        """The engine's choices under these flags. Only a lower threshold than its own counts."""
        found = dict(engine)
        for name in ("sparse_prefill", "decode"):
            if self.kernel is not None and name in found:
                found[name] = self.kernel
        if self.forbids_mha(batch) and "prefill_path" in found:
            found["prefill_path"] = "mla"
        return found

    def forbids_mha(self, batch: Batch) -> bool:
        """Whether the threshold is lower than a sequence of the batch."""
        return self.threshold is not None and batch.max_kv > self.threshold

    def words(self, *, extend: bool) -> list[str]:
        """The flags as for a command line and an environment."""
        found = []
        if self.kernel is not None:
            found.append(f"{PREFILL_FLAG if extend else DECODE_FLAG} {self.kernel}")
        if self.threshold is not None:
            found.append(f"{THRESHOLD}={self.threshold}")
        return found


DEFAULTS = Flags()
"""The engine's own."""


def flags_for(policies: Mapping[str, Policy], *, extend: bool) -> tuple[Flags, ...]:
    """What may be set for extends, or for the other passes; the defaults come first."""
    if not extend:
        return (DEFAULTS, *(Flags(name) for name in _kernels(policies, "decode", _DECODE)))
    if "prefill" not in policies:
        return (DEFAULTS,)
    topk = policies["prefill"].setting.profile.index_topk
    thresholds = [None, *(i * topk // _THRESHOLDS for i in range(_THRESHOLDS))]
    kernels = [None, *_kernels(policies, "prefill", _PREFILL)]
    return tuple(Flags(kernel, most) for kernel in kernels for most in thresholds)


def _kernels(policies: Mapping[str, Policy], point: str, known: tuple[str, ...]) -> list[str]:
    """The engine's kernels that this device and layout have an arm for."""
    if point not in policies:
        return []
    arms = {one.name.rpartition("/")[2] for one in policies[point].candidates}
    return [name for name in known if name in arms]
