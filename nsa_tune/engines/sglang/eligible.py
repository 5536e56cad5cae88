"""When the plug-in leaves a part of an engine to SGLang: one table, for all parts.

`ROWS` is read by everything that replaces something of SGLang's, by `nsa-tune doctor`, and by the
page docs/sglang.md, which shows it. What an engine's start has proven wrong or slow is not here:
that is found anew in each engine (pass_mode/proof.py, kernels/swap.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang.facts import facts_of, is_dense_mla
from nsa_tune.engines.sglang.ranks import parallel
from nsa_tune.engines.sglang.releases import DENSE_PATHS, INDEXER
from nsa_tune.engines.sglang.switch import SAME_NUMERICS, SWITCHES, Part, switch_is_on
from nsa_tune.engines.switches import asked_for
from nsa_tune.engines.symbols import hooks_on

LONGEST_DENSE = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
"""SGLang's own variable: keys up to which attention may be dense. SGLang sets it when it starts."""
PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
"""SGLang's own variable."""
PADDED_HEADS = 64
"""Heads that FlashMLA's sparse kernel takes on Hopper, or a multiple."""
_HOPPER, _AMPERE = 9, 8
_RESOLVED = "sglang.srt.arg_groups.overrides"
"""Where later releases say what became of a launch argument: `server_args` keeps what was given."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What is looked at. SGLang builds these one after the other: not all are there at first."""

    runner: Any
    """SGLang's ModelRunner."""
    backend: Any
    """Its attention backend."""
    graphs: Any = None
    """Its PrefillCudaGraphRunner."""

    @classmethod
    def of(cls, runner: Any) -> Engine:
        """The engine of a ModelRunner that has been built."""
        graphs = getattr(runner, "prefill_cuda_graph_runner", None)
        return cls(runner, runner.attn_backend, graphs)

    def argument(self, name: str) -> Any:
        """A launch argument as SGLang goes by it; None where this release has none of that name."""
        resolved = getattr(sys.modules.get(_RESOLVED), "resolution_result", getattr)
        return resolved(self.runner.server_args, name, None)


@dataclass(frozen=True, slots=True)
class Row:
    """A reason to leave parts of the plug-in out."""

    reason: str
    parts: frozenset[Part]
    applies: Callable[[Engine], bool]


def variable_set(name: str) -> bool:
    """Whether the environment variable `name` means yes, as SGLang reads it."""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "n")


def why_not(part: Part, engine: Engine) -> str | None:
    """Why `part` is left to SGLang in an engine; None where it need not be."""
    if not switch_is_on(part):
        return f"{SWITCHES[part]} is set to 0"
    return next((row.reason for row in ROWS if part in row.parts and row.applies(engine)), None)


def as_markdown() -> list[str]:
    """The table as docs/sglang.md shows it: a line for all reasons that leave out the same."""
    order = [Part.TABLE, Part.PASSES, Part.TOPK, Part.COPIES, Part.DECODE]
    within = {Part.DENSE, Part.DENSE_MLA, Part.SPARSE, Part.DECODE_GRAPHS}
    reasons: dict[tuple[str, ...], list[str]] = {}
    for reason in dict.fromkeys(row.reason for row in ROWS):
        parts = frozenset[Part]().union(*(row.parts for row in ROWS if row.reason == reason))
        cells = ["off" if part in parts else "" for part in order]
        if without := [f"no {part}" for part in Part if part in parts & within]:
            cells[order.index(Part.PASSES)] = ", ".join(without)
        reasons.setdefault(tuple(cells), []).append(reason)
    lines = [("with", *order), ("---",) * (1 + len(order))]
    lines += [("; ".join(alike), *cells) for cells, alike in reasons.items()]
    return [f"| {' | '.join(line)} |".replace("  ", " ") for line in lines]


def _row(reason: str, applies: Callable[[Engine], bool], *parts: Part) -> Row:
    return Row(reason, frozenset(parts), applies)


def _argument(name: str) -> Callable[[Engine], bool]:
    return lambda engine: bool(engine.argument(name))


def _speculates(engine: Engine) -> bool:
    return not engine.runner.spec_algorithm.is_none()


def _data_parallel(engine: Engine) -> bool:
    # As it was given: later releases take the argument back once it is resolved.
    given = getattr(engine.runner.server_args, "enable_dp_attention", False)
    return bool(given) or parallel().attn_dp_size > 1


def _capability() -> int:
    """The GPU's major compute capability; 0 for other makers'."""
    import torch

    return 0 if torch.version.cuda is None else torch.cuda.get_device_capability()[0]


def _shares_topk_over_mtp_steps(engine: Engine) -> bool:
    """Whether the draft worker hands its prefill's top-k to its decode as pool slots.

    In flashmla_sparse over packed fp8 they are offsets into the batch's own keys, and releases
    without this method copy them as they are.
    """
    config = engine.runner.model_config.hf_config
    shared = getattr(config, "index_share_for_mtp_iteration", False)
    converted = hasattr(engine.backend, "prepare_mtp_seed_indices")
    draft = getattr(engine.runner, "is_draft_worker", False)
    return bool(draft and shared and not converted)


def _keeps_attention_sparse(engine: Engine) -> bool:
    backend = engine.backend
    if not _has_indexer(engine):
        return False
    try:
        longest = float(int(os.environ.get(LONGEST_DENSE, "")))
    except ValueError:
        longest = float("inf")
    return not getattr(backend, "supports_mha_one_shot", True) or longest < backend.dsa_index_topk


def _has_indexer(engine: Engine) -> bool:
    return hasattr(engine.backend, "set_dsa_prefill_impl")


def _unknown(engine: Engine) -> bool:
    """Whether it runs dense MLA that was never tried: nothing is captured for it then."""
    try:
        return not (_has_indexer(engine) or facts_of(engine.backend, engine.runner))
    except LeftAlone:
        return True


def reads_back(backend: Any) -> bool:
    """Whether prefixes are read back: the pool is packed fp8."""
    return bool(backend.dsa_kv_cache_store_fp8)


def pads(backend: Any) -> bool:
    """Whether queries are padded."""
    heads = int(backend.num_q_heads)
    return heads < PADDED_HEADS and PADDED_HEADS % heads == 0


def _unhooked(methods: Callable[[Engine], Sequence[object]], *parts: Part) -> Row:
    reason = "a hook that is not in place"
    return _row(reason, lambda engine: not all(map(hooks_on, methods(engine))), *parts)


_OFF = (Part.TABLE, Part.PASSES, Part.TOPK, Part.COPIES, Part.DECODE)

ROWS: tuple[Row, ...] = (
    _row(
        "another attention than DSA and dense MLA by FlashAttention-3",
        lambda engine: not (_has_indexer(engine) or is_dense_mla(engine.backend)), *_OFF,
    ),
    # Its passes of few tokens keep the GPU busy: by decode graphs they took up to 11 % longer.
    _row(
        "dense MLA", lambda engine: not _has_indexer(engine),
        Part.TABLE, Part.DENSE_MLA, Part.SPARSE, Part.DECODE_GRAPHS, Part.TOPK, Part.COPIES,
        Part.DECODE,
    ),
    _row("dense MLA of other models than V3, R1 and Kimi K2, or over fp8", _unknown, Part.PASSES),
    _row("deterministic inference", lambda engine: engine.backend.num_splits != 0, *_OFF),
    _row(
        "HiSparse",
        lambda engine: getattr(engine.backend, "hisparse_coordinator", None) is not None, *_OFF,
    ),
    _row(
        "a sharded KV pool",
        lambda engine: getattr(engine.backend, "_kv_shard_pool", None) is not None,
        Part.TABLE, Part.PASSES, Part.TOPK, Part.COPIES,
    ),
    _row(
        "decode context parallelism", lambda engine: getattr(engine.backend, "dcp_size", 1) > 1,
        Part.TABLE, Part.PASSES, Part.TOPK, Part.DECODE,
    ),
    _row(
        "pooled indexer keys", lambda engine: getattr(engine.backend, "dsa_index_kpool", 1) > 1,
        Part.TABLE, Part.PASSES, Part.TOPK,
    ),
    _row(
        "context parallelism", lambda _: parallel().attn_cp_size > 1,
        Part.TABLE, Part.PASSES, Part.TOPK,
    ),
    # A rank that decides otherwise (it has another table, say) would take rank 0's for its own.
    _row(
        "one rank's selection for all (`SGLANG_DSA_TOPK_BROADCAST`)",
        lambda _: variable_set("SGLANG_DSA_TOPK_BROADCAST"),
        Part.TABLE, Part.PASSES, Part.TOPK,
    ),
    # By them passes round otherwise than by default; other ways are kept if they do not (proof.py).
    _row(
        f"`{SAME_NUMERICS}=1`", lambda _: asked_for(SAME_NUMERICS),
        Part.TABLE, Part.DENSE, Part.DENSE_MLA, Part.DECODE,
    ),
    # A stage of other length is priced otherwise, and its top-k goes on to the next stage.
    _row(
        "pipeline parallelism", lambda engine: (engine.argument("pp_size") or 1) > 1,
        Part.TABLE, Part.PASSES,
    ),
    _row(
        "attention sinks",
        lambda engine: bool(
            getattr(engine.runner.model_config.hf_config, "learnable_sink", False)
        ),
        Part.TABLE, Part.PASSES,
    ),
    _row(
        "top-k shared over MTP steps, unconverted", _shares_topk_over_mtp_steps,
        Part.TABLE, Part.PASSES,
    ),
    # Ranks have batches of their own, filled up with tokens that FlashAttention-3 refuses. No gain
    # was ever measured on two GPUs.
    _row("DP attention", _data_parallel, Part.TABLE, Part.PASSES),
    _row(
        "a model that does not generate", lambda engine: not engine.runner.is_generation,
        Part.PASSES,
    ),
    _row(
        "an all-to-all between experts, which cannot be captured",
        lambda engine: engine.argument("moe_a2a_backend") not in (None, "none"),
        Part.PASSES,
    ),
    _row("LoRA", _argument("enable_lora"), Part.PASSES),
    # A prefix may arrive layer by layer.
    _row("a hierarchical cache (HiCache)", _argument("enable_hierarchical_cache"), Part.PASSES),
    # Page tables then hold numbers that SGLang translates before a kernel reads them.
    _row("`--enable-unified-memory`", _argument("enable_unified_memory"), Part.PASSES),
    _row("two-batch overlap", _argument("enable_two_batch_overlap"), Part.PASSES),
    _row("PD multiplexing", _argument("enable_pdmux"), Part.PASSES),
    # Each layer fetches the weights of a later one: passes over few layers leave the wrong ones.
    _row(
        "weights fetched while layers run (`--offload-group-size`)",
        lambda engine: (engine.argument("offload_group_size") or 0) > 0, Part.PASSES,
    ),
    # Passes over placeholders compute nothing that could be compared, and take other times.
    _row(
        "weights that come after the graphs (`--startup-weight-load-mode overlap`)",
        lambda engine: engine.argument("startup_weight_load_mode") == "overlap",
        Part.PASSES,
    ),
    _row(
        "no prefill CUDA graphs",
        lambda engine: not hasattr(engine.graphs, "capture_num_tokens"),
        Part.PASSES,
    ),
    _row(
        "prefill graphs of another kind than breakable ones",
        lambda engine: (
            "BreakableCudaGraphBackend"
            not in {kind.__name__ for kind in type(engine.graphs.backend).__mro__}
        ),
        Part.DENSE, Part.SPARSE,
    ),
    # Dense attention there reads lengths that a graph would keep.
    _row(
        "another GPU than Hopper", lambda engine: _capability() != _HOPPER,
        Part.DENSE, Part.SPARSE, Part.COPIES, Part.DECODE,
    ),
    _row(
        "a GPU before compute capability 8.0", lambda engine: _capability() < _AMPERE, Part.TOPK
    ),
    # A graph's code runs anew in each pass.
    _row("`--debug-cuda-graph`", _argument("debug_cuda_graph"), Part.DENSE, Part.SPARSE),
    # Over an fp8 pool they are slots for one kernel, and places among the keys read for another.
    _row(
        "selected keys that are returned (`--enable-return-indexer-topk`)",
        _argument("enable_return_indexer_topk"),
        Part.TABLE, Part.DENSE, Part.SPARSE, Part.DECODE_GRAPHS,
    ),
    _row(f"`{LONGEST_DENSE}` below `index_topk`", _keeps_attention_sparse, Part.DENSE),
    _row("an fp8 pool", lambda engine: reads_back(engine.backend), Part.DENSE_MLA),
    # Others verify trees, ragged rows, or have no hidden states of this kind.
    _row(
        "speculative decoding other than EAGLE and MTP",
        lambda engine: (
            _speculates(engine) and getattr(engine.runner.spec_algorithm, "name", "") != "EAGLE"
        ),
        Part.DECODE_GRAPHS,
    ),
    _row(
        "drafts that are trees (`--speculative-eagle-topk` above 1)",
        lambda engine: _speculates(engine) and engine.backend.topk > 1, Part.DECODE_GRAPHS,
    ),
    # For each number it has another backend, which no start has proven kernels in.
    _row(
        "a number of draft tokens that changes (`--speculative-adaptive`)",
        _argument("speculative_adaptive"), Part.TABLE, Part.DECODE_GRAPHS,
    ),
    _row(
        "several draft layers (`--enable-multi-layer-eagle`)",
        _argument("enable_multi_layer_eagle"), Part.DECODE_GRAPHS,
    ),
    # It writes the graphs' inputs on another stream, which waits for no prefill.
    _row(f"`{PLAN_STREAM}`", lambda _: variable_set(PLAN_STREAM), Part.DECODE_GRAPHS),
    _row(
        "routed experts that are returned", _argument("enable_return_routed_experts"),
        Part.DECODE_GRAPHS,
    ),
    # Rows between two captured sizes would run as an eager decode.
    _row(
        "`--disable-cuda-graph-padding`", _argument("disable_cuda_graph_padding"),
        Part.DECODE_GRAPHS,
    ),
    _row(
        "no decode CUDA graphs (a prefill server has them by `--cuda-graph-backend-decode full`)",
        lambda engine: not hasattr(engine.runner.decode_cuda_graph_runner, "capture_bs"),
        Part.DECODE_GRAPHS,
    ),
    _row(
        "another `--dsa-topk-backend` than `sgl-kernel`",
        lambda engine: not engine.backend.dsa_topk_backend.is_sgl_kernel(), Part.TOPK, Part.SPARSE,
    ),
    _row(
        "`SGLANG_DSA_FUSE_TOPK=0`", lambda engine: not engine.backend.use_fused_topk,
        Part.TOPK, Part.SPARSE,
    ),
    _row(
        "a bf16 pool and as many heads as the kernel takes: nothing is copied",
        lambda engine: not (reads_back(engine.backend) or pads(engine.backend)), Part.COPIES,
    ),
    _row(
        "another `--dsa-decode-backend` than `fa3`",
        lambda engine: str(engine.backend.dsa_decode_impl) != "fa3", Part.DECODE,
    ),
    _unhooked(lambda engine: [type(engine.backend.dsa_topk_backend).topk_transform], Part.TOPK),
    _unhooked(lambda engine: [type(engine.backend)._forward_flashmla_sparse], Part.COPIES),
    _unhooked(lambda engine: [type(engine.backend)._forward_fa3], Part.DECODE),
    # The one without the other would replay a graph with another graph's metadata.
    _unhooked(
        lambda engine: [
            type(engine.graphs.backend).replay,
            type(engine.graphs)._prepare_forward_metadata_for_replay,
        ],
        Part.DENSE, Part.SPARSE,
    ),
    _unhooked(
        lambda engine: [] if _has_indexer(engine) else [
            import_module(DENSE_PATHS)._handle_attention_backend
        ],
        Part.PASSES,
    ),
    # Without both, sparse attention by the dummy batch's selection would be captured.
    _unhooked(
        lambda engine: [
            type(engine.backend).forward_extend,
            import_module(INDEXER).Indexer._forward_cuda_k_only,
        ],
        Part.DENSE_MLA, Part.SPARSE,
    ),
)  # fmt: skip
"""In the order in which reasons are looked for."""
