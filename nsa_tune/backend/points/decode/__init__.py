"""Decision point `decode`: which sparse attention kernel decodes and verifies.

The whole of one layer but the indexer: absorb q, attend to each row's selection, project to v. A
row is a query token, since engines pass next_n queries of a sequence as rows of their own. What an
arm reads back has the same size at any context, so that a CUDA graph can hold each of them.
"""

from __future__ import annotations

from math import exp, log, log2
from random import Random
from typing import TYPE_CHECKING

from nsa_tune.backend.points import guards
from nsa_tune.backend.points.prefill import mla
from nsa_tune.backend.points.prefill.terms import attended_of, pairs_in_waves, wave_of
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Answer, Arm, Case, Point, Setting

if TYPE_CHECKING:
    import torch

__all__ = ["DECODE"]

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (1 / 2, 1, 2, 8, 32, 64)
"""In index_topk."""
_NEXT_NS = (1, 2, 4)


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.prefill.case import prefill_case

    return prefill_case(batch, setting, device)


def _cost_terms(batch: Batch, setting: Setting) -> tuple[float, ...]:
    attended, wave = attended_of(batch, setting.profile.index_topk), wave_of(setting)
    longest = min(batch.max_kv, setting.profile.index_topk)
    return (
        batch.q_tokens,
        attended,
        pairs_in_waves(attended, batch.q_tokens, longest, wave),
        (batch.q_tokens + (wave - 1)) // wave,
    )


def _term_bounds(batch: Batch, setting: Setting) -> tuple[tuple[float, float] | None, ...]:
    # The waves before the last hold fewer than all queries; in the last no query attends to more
    # than index_topk.
    attended, wave = attended_of(batch, setting.profile.index_topk), wave_of(setting)
    most = attended + setting.profile.index_topk * wave
    return (None, None, (attended, most), (1, (batch.q_tokens + (wave - 1)) / wave))


def _locate(batch: Batch, setting: Setting) -> tuple[float, ...]:
    attended = attended_of(batch, setting.profile.index_topk)
    mean = batch.kv_tokens / batch.sequences
    return (log2(batch.q_tokens), log2(attended / batch.q_tokens), log2(mean) / 4)


def _most_kv(setting: Setting) -> int:
    """Most kv tokens of a swept batch: a pool of a GB, or what a CPU fills in a second."""
    return (64 if setting.device.arch == "cpu" else 512) * setting.profile.index_topk


def _grid(setting: Setting) -> list[Batch]:
    """Sequences by context by next_n: a third of equal round contexts, a third of equal uneven
    ones, and a third of three lengths; coarse batches first."""
    random, fits = Random(0), []
    topk = setting.profile.index_topk
    for i, count in enumerate(_SEQUENCES[::2] if setting.device.arch == "cpu" else _SEQUENCES):
        for j, scale in enumerate(_CONTEXTS):
            for k, next_n in enumerate(_NEXT_NS):
                if count * round(scale * topk) <= _most_kv(setting):
                    contexts = _contexts(random, count, round(scale * topk), (i + j + k) % 3)
                    fits.append((i % 2 + j % 2, random.random(), _batch(contexts, next_n)))
    return [batch for _, _, batch in sorted(fits, key=lambda fit: fit[:2])]


def _contexts(random: Random, count: int, context: int, kind: int) -> list[int]:
    """`count` contexts about `context`: equal and round (0), equal and uneven (1), of three uneven
    lengths (2)."""
    if kind == 0:
        return [context] * count
    lengths = [round(context * part) for part in ((1,) if kind == 1 else (1 / 2, 1, 3 / 2))]
    uneven = [max(length - random.randint(1, length // 8 + 1) | 1, 5) for length in lengths]
    return [uneven[i * len(uneven) // count] for i in range(count)]


def _batch(contexts: list[int], next_n: int) -> Batch:
    return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)


def _sample(setting: Setting, random: Random) -> Batch:
    """A random decode or verify of 1 to 256 sequences; half of them ragged."""
    topk, next_n = setting.profile.index_topk, random.choice(_NEXT_NS)
    count = round(exp(random.uniform(0, log(256))))
    longest = max(min(64 * topk, _most_kv(setting) // count), topk // 4)

    def context() -> int:
        return max(round(exp(random.uniform(log(topk / 8), log(longest)))), next_n)

    if random.random() < 0.5:
        return _batch([context() for _ in range(count)], next_n)
    return _batch([context()] * count, next_n)


_BF16 = frozenset({KVLayout.BF16})
_PACKED = frozenset({KVLayout.FP8_PACKED})
_BOTH = _BF16 | _PACKED
_FLASHMLA = frozenset({"sm90", "sm100"})
_BLACKWELL = frozenset({"sm100", "sm103"})
_KV = (
    guards.SOME_ROWS,
    guards.FLASHMLA_SHAPE,
    guards.FLASHMLA_SCHEDULE,
    guards.FLASHMLA_OFFSETS,
    guards.FLASHMLA_SCRATCH,
    guards.multiple_of_topk(
        64, "flash_mla_with_kvcache", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689"
    ),
)
_SPARSE = (
    guards.SOME_ROWS,
    guards.FLASHMLA_SHAPE,
    guards.SPARSE_FWD_OFFSETS,
    guards.SPARSE_FWD_BYTES,
    guards.SELECTION_BYTES,
    guards.multiple_of_topk(
        128, "flash_mla_sparse_fwd", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:577"
    ),
)
_ARMS = (
    Arm(
        "flashmla_kv", mla.build_flashmla_kv, _PACKED, "flash_mla", _FLASHMLA, _KV,
        surcharge_us=guards.schedule_surcharge_us,
    ),
    Arm("trtllm", mla.build_trtllm, _BF16, "flashinfer", _BLACKWELL,
        (guards.SOME_ROWS, guards.TRTLLM_SPARSE_SHAPE)),
    Arm("flashmla_sparse", mla.build_flashmla_selected, _BOTH, "flash_mla", _FLASHMLA, _SPARSE),
    Arm(
        "triton", mla.build_triton, _BOTH, archs=ANY_GPU,
        guards=(guards.SOME_ROWS, guards.TRITON_SHAPE),
    ),
    Arm("torch_kv", mla.build_torch_kv, _PACKED, reference=True),
    Arm("torch_sparse", mla.build_torch_selected, _BOTH, reference=True),
)  # fmt: skip

DECODE = Point(
    name="decode",
    modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND}),
    arms=_ARMS,
    answers=(Answer("decode", {arm.name: (arm.name,) for arm in _ARMS}),),
    terms=("rows", "attended_pairs", "attended_pairs_in_waves_to_the_longest", "waves"),
    cost_terms=_cost_terms,
    term_bounds=_term_bounds,
    coordinates=("rows", "attended_per_row", "mean_context"),
    locate=_locate,
    sheet=lambda batch, setting: 0,
    grid=_grid,
    case=_case,
    sample=_sample,
)
