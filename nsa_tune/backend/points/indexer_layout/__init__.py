"""Decision point `indexer_layout`: how `next_n` queries a sequence reach the indexer's kernel.

`native` passes [batch, next_n]; `pairs` splits it into [batch * next_n / 2, 2]; `flatten` into
[batch * next_n, 1]. A layout that splits repeats the block table's rows and reads the keys once
for each of them. The schedule and the repeated tables are made once a pass for all layers and are
not in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, log2
from random import Random
from typing import TYPE_CHECKING

from nsa_tune.backend.points import guards
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Answer, Arm, Case, Guard, Point, Setting

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_layout.case import IndexerCase

__all__ = ["INDEXER_LAYOUT"]

_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_STEPS = {"native": None, "pairs": 2, "flatten": 1}
"""Queries a row; native takes all next_n."""
_SEGMENT = 256
"""Keys that DeepGEMM gives an SM at once (csrc/apis/attention.hpp, split_kv)."""


def _deep_gemm(step: int | None) -> Callable[[IndexerCase], Callable[[], torch.Tensor]]:
    """DeepGEMM's paged MQA logits with `step` queries a row."""

    def build(case: IndexerCase) -> Callable[[], torch.Tensor]:
        from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm

        each = step or case.batch.next_n
        repeats = case.batch.next_n // each
        q = case.q.view(-1, each, *case.q.shape[2:])
        lens = case.context_lens.view(-1, each)
        table = case.block_table.repeat_interleave(repeats, dim=0)
        metadata = deep_gemm.schedule(lens, case.profile.page_size)
        return lambda: deep_gemm.paged_mqa_logits(
            q, case.pool, case.weights, lens, table, metadata, case.max_context
        )

    return build


def _torch(step: int | None) -> Callable[[IndexerCase], Callable[[], torch.Tensor]]:
    """The same in torch: each row gathers its keys and scores `step` queries against them."""

    def build(case: IndexerCase) -> Callable[[], torch.Tensor]:
        import torch

        each = step or case.batch.next_n
        repeats = case.batch.next_n // each
        page, dim = case.profile.page_size, case.profile.index_dim
        flat = case.pool.view(case.pool.shape[0], page * (dim + 4))
        q = case.q.view(-1, each, *case.q.shape[2:])
        weights = case.weights.view(-1, each, case.weights.shape[1])
        lens = case.context_lens.view(-1, each)

        def run() -> torch.Tensor:
            out = torch.zeros(*lens.shape, case.max_context, device=case.device)
            for row in range(lens.shape[0]):
                seen = int(lens[row, -1])
                pages = flat[case.block_table[row // repeats, : -(-seen // page)].long()]
                keys = pages[:, : page * dim].contiguous().view(torch.float8_e4m3fn)
                scales = pages[:, page * dim :].contiguous().view(torch.float32).flatten()
                scores = torch.einsum("nhd,kd->nhk", q[row].float(), keys.float().view(-1, dim))
                logits = torch.einsum("nhk,nh->nk", scores.relu(), weights[row]) * scales
                out[row, :, :seen] = logits[:, :seen]
            return out.flatten(0, 1)

        return run

    return build


def _even_next_n(batch: Batch, setting: Setting) -> str | None:
    del setting
    if batch.next_n < 4 or batch.next_n % 2:
        return f"pairs split an even next_n of 4 or more, {batch.next_n} given"
    return None


def _more_than_one(batch: Batch, setting: Setting) -> str | None:
    del setting
    return "with next_n 1 flatten is native itself" if batch.next_n == 1 else None


_PAIRS = Guard(
    "pairs_even", "semantic", "2 queries a row; with next_n 2 it is native itself", _even_next_n
)
_FLATTEN = Guard(
    "flatten_splits", "semantic", "1 query a row; with next_n 1 it is native itself",
    _more_than_one,
)  # fmt: skip
_SPLITS: dict[str, tuple[Guard, ...]] = {"native": (), "pairs": (_PAIRS,), "flatten": (_FLATTEN,)}
_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
_DEEP_GEMM_ARCHS = frozenset({"sm90", "sm100"})


def _arms() -> tuple[Arm, ...]:
    arms = []
    for name, step in _STEPS.items():
        limits = (*_SPLITS[name], guards.SOME_ROWS, guards.MQA_LOGITS_BYTES)
        kernel = (*limits, guards.MQA_SHAPE)
        if name == "native":
            kernel = (*kernel, guards.NEXT_N_SM90)
        arms.append(
            Arm(f"{name}/deep_gemm", _deep_gemm(step), _ANY, "deep_gemm", _DEEP_GEMM_ARCHS, kernel)
        )
    for name, step in _STEPS.items():
        limits = (*_SPLITS[name], guards.MQA_LOGITS_BYTES)
        arms.append(Arm(f"{name}/torch", _torch(step), _ANY, guards=limits, reference=True))
    return tuple(arms)


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.indexer_layout.case import indexer_case

    return indexer_case(batch, setting, device)


def _cost_terms(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    return (batch.q_tokens, batch.kv_tokens)


def _sheet(batch: Batch, setting: Setting) -> int:
    """By queries a sequence, and by whether an SM has more than one segment of keys once they are
    flattened: up to there `flatten` is the fastest, and a second segment costs as much as a row."""
    next_n = batch.next_n
    if next_n * batch.kv_tokens > _SEGMENT * setting.device.sms:
        return 2 * next_n + 1
    return 2 * next_n


def _locate(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    skew = batch.max_kv * batch.sequences / batch.kv_tokens
    return (log2(batch.kv_tokens), log2(batch.sequences) / 2, log2(skew) / 2)


def _most_keys(setting: Setting) -> int:
    """Most kv tokens of a swept batch: the index keys of a big pool, or what a CPU can score."""
    topk = setting.profile.index_topk
    return 64 * topk if setting.device.arch == "cpu" else 2048 * topk


def _grid(setting: Setting) -> list[Batch]:
    """Sequences by context by next_n, all equal and, for powers of two, of several lengths.

    With equal contexts and a power-of-two batch each sequence's keys fall on the same SMs for all
    of its split rows, which then share the L2; contexts of a real batch never line up like that.
    Half of the contexts are no multiples of a page or of a segment of 256 keys, as real ones.
    """
    topk, random = setting.profile.index_topk, Random(1)
    fits = []
    for i, count in enumerate(_SEQUENCES[::2] if setting.device.arch == "cpu" else _SEQUENCES):
        for j, scale in enumerate((1 / 2, 1, 2, 4, 8, 16, 32, 64)):
            context = round(scale * topk)
            if count * context <= _most_keys(setting):
                rank, uneven = i % 2 + j % 2, (i // 2 + j + 1) % 2
                equal = _uneven(random, context) if uneven else context
                fits += [(rank, (equal,) * count, next_n) for next_n in (2, 3, 4)]
                if count > 1 and count & (count - 1) == 0 and scale < 64:
                    mixed = _three_lengths(count, context)
                    if uneven:
                        mixed = _many_lengths(random, count, context)
                    fits += [(rank, mixed, next_n) for next_n in (2, 3, 4)]
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    order = Random(0)
    fits = sorted(fits, key=lambda fit: (fit[0], order.random()))
    return [_batch(list(contexts), next_n) for _, contexts, next_n in fits]


def _uneven(random: Random, context: int) -> int:
    """An odd length of 3/4 to all of `context`."""
    return random.randint(context * 3 // 4, context - 1) | 1


def _many_lengths(random: Random, count: int, context: int) -> tuple[int, ...]:
    """`count` contexts of up to 8 uneven lengths about `context`."""
    kinds = min(count, 8)
    lengths = [_uneven(random, round(context * (k + 1) * 2 / (kinds + 1))) for k in range(kinds)]
    return tuple(lengths[i * kinds // count] for i in range(count))


def _three_lengths(count: int, context: int) -> tuple[int, ...]:
    """`count` contexts of 1/2, 1 and 3/2 of `context`, as many short ones as long ones."""
    outer = (count + 1) // 3
    middle = count - 2 * outer
    return (
        *(round(context * 1.5),) * outer,
        *(context,) * middle,
        *(context // 2,) * outer,
    )


def _batch(contexts: list[int], next_n: int) -> Batch:
    return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)


def _sample(setting: Setting, random: Random) -> Batch:
    """A random decode or verify of 1 to 128 sequences; half of them ragged."""
    topk, next_n = setting.profile.index_topk, random.choice((2, 3, 4))
    count = round(exp(random.uniform(0, log(128))))
    longest = min(64 * topk, _most_keys(setting) // count)

    def context() -> int:
        return round(exp(random.uniform(log(topk / 2), log(longest))))

    if random.random() < 0.5:
        return _batch([context() for _ in range(count)], next_n)
    return _batch([context()] * count, next_n)


INDEXER_LAYOUT = Point(
    name="indexer_layout",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND}),
    arms=_arms(),
    answers=(
        Answer(
            "indexer_layout",
            {name: (f"{name}/deep_gemm", f"{name}/torch") for name in _STEPS},
        ),
    ),
    terms=("rows", "keys"),
    cost_terms=_cost_terms,
    coordinates=("keys", "sequences", "longest_over_mean"),
    locate=_locate,
    sheet=_sheet,
    kin=lambda sheet: sheet // 2,
    grid=_grid,
    case=_case,
    sample=_sample,
)
