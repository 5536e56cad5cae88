"""The hook around each symbol of SGLang that the plug-in touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.sglang.backend import around_init
from nsa_tune.engines.sglang.indexer import around_context_lens
from nsa_tune.engines.sglang.kernels.copies import around_read_back, around_sparse
from nsa_tune.engines.sglang.kernels.decode import around_fa3
from nsa_tune.engines.sglang.kernels.topk import around_topk
from nsa_tune.engines.sglang.pass_mode import hooks as pass_mode
from nsa_tune.engines.sglang.pass_mode.whole_pass import attention, expanded
from nsa_tune.engines.sglang.prefill import around_prefill

HOOKS: Mapping[str, Callable[..., Any]] = {
    "backend": around_init,
    "prefill": around_prefill,
    "indexer": around_context_lens,
    "init_graphs": pass_mode.around_init_graphs,
    "forward": pass_mode.around_forward,
    "can_run": pass_mode.around_can_run,
    "capture": pass_mode.around_capture,
    "capture_decode": pass_mode.around_capture_decode,
    "prepare_metadata": pass_mode.around_prepare_metadata,
    "extend": attention.around_extend,
    "dense_path": expanded.around_path,
    "k_only": attention.around_k_only,
    "replay": pass_mode.around_replay,
    "topk": around_topk,
    "fa3": around_fa3,
    "sparse": around_sparse,
    "read_back": around_read_back,
}
"""By the name of the symbol."""
