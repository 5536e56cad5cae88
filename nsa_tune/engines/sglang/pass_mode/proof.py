"""Does each way compute what SGLang's own way does? An engine's start finds out, by running it.

A few batches run in SGLang's own way and in each other way that can run them. Their logits are
compared (with speculative decoding the hidden states of all new tokens too, which its draft layer
reads). Ways round differently, as SGLang's own flags do. So how far a way may be away is measured
as well: by SGLang's passes without a graph, which attend to short sequences by MHA where its graphs
take MLA (`--disable-prefill-cuda-graph`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nsa_tune.backend.types.profiles import ALL_TOKENS
from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang import attempt
from nsa_tune.engines.sglang.facts import index_topk_of, kernel_of
from nsa_tune.engines.sglang.pass_mode import made_up
from nsa_tune.engines.sglang.pass_mode.made_up import SHORT
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering, attribute
from nsa_tune.engines.sglang.pass_mode.whole_pass.prefix_graphs import PREFIXES
from nsa_tune.engines.sglang.prefill import PROVEN_KERNEL, chosen, kernels_to_prove
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import SAME_NUMERICS
from nsa_tune.engines.switches import asked_for

_FACTOR = 2.0
"""A way may be so many times as far from SGLang's own as SGLang's passes without a graph are. Of
200 greedy answers 101 (bf16) and 95 (fp8) change by a flag, 31 and 87 by the plug-in, where the
best two tokens are up to 0.22 nats apart (docs/gains.md)."""
_LEAST, _MOST = 0.05, 0.5
"""The same as shares of the logits' norm, whatever SGLang's passes without a graph differ by. Each
layer's attention alone rounds by 0.0045 of its norm; logits of unrelated tokens are 1.4 apart."""
_ROWS_A_REPLAY = 4
"""A sentinel runs by decode graphs if so many replays are enough for it."""


@dataclass(frozen=True, slots=True)
class Sentinel:
    """A batch that is compared. Lengths are odd, so that graphs are padded."""

    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        pairs = zip(self.prefix_lens, self.extend_lens, strict=True)
        return tuple(prefix + new for prefix, new in pairs)


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of it, the same on all ranks but for the numbers."""

    errors: Mapping[str, float]
    """How far each way, or kernel, was from SGLang's own, at most: a share of the logits' norm."""
    bound: float
    """How far it may be."""
    wrong: Mapping[str, str]
    """Why a way is not taken, for those that are not."""

    def why(self, mode: str) -> str:
        """What is known of a way that is right, in words; it must be in `errors`."""
        if not self.errors[mode]:
            return "its logits equal SGLang's own in all batches that were compared"
        return f"its logits differ by {self.errors[mode]:.3f}, {self.bound:.3f} are allowed"


def sentinels(runner: Any) -> Iterator[Sentinel]:
    """The batches for an engine, as far as there is room for them."""
    topk = min(index_topk_of(runner.attn_backend), SHORT)
    largest = max(runner.prefill_cuda_graph_runner.capture_num_tokens)
    prompt = min(1531, topk - 3)
    tokens = max(int(0.93 * largest), 1)
    full = -(-tokens // prompt)
    batches = [
        Sentinel((0,), (37,)),
        Sentinel((0,) * 8, (97, 33, 61, 128, 5, 64, 17, 80)),
        # Turns behind short prefixes, and one behind a prefix from which keys are selected.
        Sentinel((700, 1301, 64), (41, 25, 9)),
        Sentinel((topk + 1003,), (51,)),
        # Prompts of all kinds in one pass, of which some select keys.
        Sentinel((topk + 517, 0, 1301, 2 * topk + 9), (301, 77, 130, 65)),
        # As many prompts as the largest graph holds.
        Sentinel((0,) * full, (max(tokens // full, 1),) * full),
    ]
    if index_topk_of(runner.attn_backend) == ALL_TOKENS:
        # A prefix is expanded then, and a long one in graphs with more room.
        batches.append(Sentinel((PREFIXES[0] + 809,), (301,)))
    for batch in batches:
        if (
            sum(batch.extend_lens) <= largest
            and max(batch.kv_lens) <= made_up.longest(runner)
            and len(batch.kv_lens) <= made_up.requests(runner)
            and made_up.slots_for(runner, batch.kv_lens)
        ):
            yield batch


def prove(runner: Any, steering: Steering, ranks: Ranks) -> Proof:
    """Run the sentinels of `runner`, SGLang's ModelRunner, in each way. All ranks call it together.

    A way that is wrong, or fails, on one rank is wrong on all.

    Raises:
        RuntimeError: when SGLang's own way did not run on some rank.
        EngineMustStop: a way failed on this rank while the others still wait within it.
    """
    errors: dict[str, list[float]] = {}
    failed: set[str] = set()
    # A rank that has left its backend to SGLang runs as many passes as the others.
    kernels = ranks.from_first(kernels_to_prove(runner.attn_backend))
    again = ranks.from_first(asked_for(SAME_NUMERICS))
    repeated, flags = [0.0], [0.0]
    # Dense MLA is expanded behind any prefix then, which SGLang itself would absorb.
    expands = index_topk_of(runner.attn_backend) == ALL_TOKENS
    with made_up.no_events_left(runner):
        for sentinel in sentinels(runner):
            with made_up.page_tables(runner, sentinel.kv_lens) as slots:
                batch = _batch(runner, steering, sentinel, slots, ranks)
                run = partial(_run, runner, steering, batch)
                engine = _engine_outputs(ranks, run)
                if again:
                    repeated.append(difference(engine, _engine_outputs(ranks, run)))
                ways = _ways(steering, sentinel, batch)
                if not ranks.longest(_may_change_kernel(runner.attn_backend, sentinel)):
                    ways.remove(PassMode.TABLE_KERNEL)
                    errors.setdefault(PassMode.TABLE_KERNEL, []).append(0.0)
                # SGLang attends to so few keys by MHA where it runs no graph, whatever is to run.
                selects = max(sentinel.kv_lens) > index_topk_of(runner.attn_backend)
                for mode in (*ways, *(kernels if selects else ())):
                    # What fails on any rank has failed on all: they go on alike.
                    outputs = None if mode in failed else _outputs(ranks, mode, run, runner)
                    if outputs is None:
                        failed.add(mode)
                    else:
                        error = difference(engine, outputs)
                        errors.setdefault(mode, []).append(error)
                        if mode is PassMode.EAGER and not (expands and any(sentinel.prefix_lens)):
                            flags.append(error)
    largest = {mode: max(of, key=_size) for mode, of in errors.items()}
    return _judged(largest | dict.fromkeys(failed, math.inf), flags, repeated, ranks, kernels)


def _size(error: float) -> float:
    """No number is the worst."""
    return math.inf if math.isnan(error) else error


def _ways(steering: Steering, sentinel: Sentinel, batch: Any) -> list[PassMode]:
    """The ways besides SGLang's own that can run a sentinel."""
    sums = sums_of(list(sentinel.prefix_lens), list(sentinel.extend_lens))
    assert sums is not None
    rows = steering.rows_of(batch)
    if rows is not None and rows > _ROWS_A_REPLAY * steering.rows[-1]:
        rows = None
    return [mode for mode in steering.choice.ways(sums, rows) if mode is not PassMode.ENGINE]


def _may_change_kernel(backend: Any, sentinel: Sentinel) -> bool:
    """Whether the table's way is another one than that of SGLang's own pass, which has just run."""
    lens = list(sentinel.prefix_lens), list(sentinel.extend_lens)
    kernel = attempt("asking for the table's kernel", chosen, backend, *lens)
    return kernel is not None and (backend.use_mha or kernel != kernel_of(backend))


def _batch(
    runner: Any, steering: Steering, sentinel: Sentinel, slots: list[Any], ranks: Ranks
) -> Any:
    """The sentinel's batch, behind whose prefixes the pool holds keys."""
    import torch

    step = max(runner.prefill_cuda_graph_runner.capture_num_tokens)
    for i, prefix in enumerate(sentinel.prefix_lens):
        for start in range(0, prefix, step):
            places = slots[i][start : min(start + step, prefix)]
            chunk = _made_up(runner, [start], [len(places)], places)
            chunk.req_pool_indices = chunk.req_pool_indices + i
            _engine_outputs(ranks, partial(_run, runner, steering, chunk))
    new = [of[prefix:] for of, prefix in zip(slots, sentinel.prefix_lens, strict=True)]
    return _made_up(runner, sentinel.prefix_lens, sentinel.extend_lens, torch.cat(new))


def _made_up(
    runner: Any, prefix_lens: Sequence[int], extend_lens: Sequence[int], slots: Any
) -> Any:
    """A batch whose token ids are the same on all ranks, whatever their random numbers are."""
    batch = made_up.prefill(runner, prefix_lens, extend_lens, slots.long())
    ids = batch.input_ids.new_ones(len(slots)).cumsum(0)
    batch.input_ids = (ids * 7919) % runner.model_config.vocab_size
    return batch


def _run(runner: Any, steering: Steering, batch: Any, mode: PassMode) -> list[Any]:
    """Logits of a sentinel in one way, and hidden states where they are returned."""
    with steering.forcing(mode):
        output = runner._forward_raw(copy.copy(batch), None).logits_output
    states = getattr(output, "hidden_states", None)
    # Graphs write their outputs to the same place in each replay.
    return [tensor.clone() for tensor in (output.next_token_logits, states) if tensor is not None]


def _engine_outputs(ranks: Ranks, run: Callable[[PassMode], list[Any]]) -> list[Any]:
    outputs = ranks.together("running sentinel passes", partial(run, PassMode.ENGINE))
    if outputs is None:
        raise RuntimeError("another rank could not run its sentinel passes")
    return outputs


def _outputs(
    ranks: Ranks, mode: str, run: Callable[[PassMode], list[Any]], runner: Any
) -> list[Any] | None:
    """What a way, or SGLang's own with a kernel, computes; None where it failed on any rank."""

    def call() -> list[Any]:
        if isinstance(mode, PassMode):
            return run(mode)
        with attribute(runner.attn_backend, PROVEN_KERNEL, mode):
            outputs = run(PassMode.TABLE_KERNEL)
        if kernel_of(runner.attn_backend) != mode:
            raise RuntimeError("another kernel has run")
        return outputs

    return attempt(f"running prefills by {mode}", ranks.together, f"trying {mode}", call)


def difference(engine: list[Any], other: list[Any]) -> float:
    """The largest difference between two passes' outputs, tensors of [rows, width] each.

    Of a tensor it is the root of the mean square, over rows, of the norm of a row's difference over
    the norm of the row about its mean. Infinity for other shapes.
    """
    if [tensor.shape for tensor in engine] != [tensor.shape for tensor in other]:
        return math.inf
    return max(map(_difference, engine, other), key=_size, default=math.inf)


def _difference(engine: Any, other: Any) -> float:
    engine, other = engine.float(), other.float()
    scale = (engine - engine.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    error = (engine - other).norm(dim=-1) / scale
    return float(error.square().mean().sqrt())


def _judged(
    errors: dict[str, float], flags: list[float], repeated: list[float], ranks: Ranks,
    kernels: Sequence[str],
) -> Proof:  # fmt: skip
    """`flags`: how far SGLang's own passes without a graph are from those with one."""
    flag = max(filter(math.isfinite, flags))
    # By default nothing runs twice: what SGLang differs by from run to run is part of `flag`.
    exactly = asked_for(SAME_NUMERICS)
    bound = max(repeated) if exactly else min(max(_LEAST, _FACTOR * flag), _MOST)
    wrong = {of: "no batch to compare it by has room" for of in kernels if of not in errors}
    # The same ways have run on all ranks, which vote on them in the same order.
    for mode in [mode for mode in (*PassMode, *kernels) if mode in errors]:
        error = errors[mode]
        # Passes without a graph are SGLang's own, whatever they differ by.
        engines = mode is PassMode.EAGER and error <= flag and not exactly
        right = engines or error <= bound
        if not ranks.agree(f"{mode} is right", "right" if right else None):
            wrong[mode] = (
                "it failed" if math.isinf(error)
                else f"its logits differ by {error:.3f}, {bound:.3f} are allowed" if not right
                else "it is wrong on another rank"
            )  # fmt: skip
    return Proof(errors, bound, wrong)
