"""Decision point `indexer_metadata`: who schedules the indexer's paged logits over the SMs.

Once a pass, for all layers. DeepGEMM's kernel is one warp with a limit of rows, compiled anew for
every 32 of them; the Triton one takes any number and is compiled once. Both give the same bits. A
row is a query token: an extend has many where the engine scores pages in prefill too (V4).
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, log2
from random import Random
from typing import TYPE_CHECKING

from nsa_tune.backend.points import guards
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Answer, Arm, Case, Point, Setting

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.points.indexer_metadata.case import MetadataCase

__all__ = ["INDEXER_METADATA"]

_DECODED = (1, 4, 16, 64, 128, 256, 512, 1024)
_EXTENDED = (1000, 2048, 4096, 8192, 11648, 16384, 32768, 58112, 65536)
"""Few numbers of rows, since DeepGEMM compiles for each; each is measured at several contexts."""


def _build_deep_gemm(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """get_paged_mqa_logits_metadata."""
    from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm

    return lambda: deep_gemm.schedule(case.context_lens, case.profile.page_size)


def _build_triton(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """nsa-tune's own kernel."""
    from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule

    return lambda: mqa_schedule(case.context_lens, case.sms, case.split)


def _build_torch(case: MetadataCase) -> Callable[[], torch.Tensor]:
    """Prefix sums and a search in torch."""
    from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule_reference

    return lambda: mqa_schedule_reference(case.context_lens, case.sms, case.split)


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.indexer_metadata.case import metadata_case

    return metadata_case(batch, setting, device)


def _cost_terms(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    return (batch.q_tokens, -(-batch.q_tokens // 32))


def _locate(batch: Batch, setting: Setting) -> tuple[float, ...]:
    del setting
    return (log2(batch.q_tokens), log2(batch.kv_tokens / batch.sequences) / 4)


def _grid(setting: Setting) -> list[Batch]:
    """Decode batches of 1 to 1024 rows and extends of up to 65536; coarse batches first."""
    random = Random(0)
    few = setting.device.arch == "cpu"
    topk = setting.profile.index_topk
    shapes = []
    for i, rows in enumerate(_DECODED[::2] if few else _DECODED):
        for j, scale in enumerate((1 / 2, 2, 8, 64)):
            longest = round(scale * topk)
            shapes.append((i % 2 + j % 2, Batch.decode(_contexts(random, rows, longest))))
    for i, rows in enumerate(_EXTENDED[:2] if few else _EXTENDED):
        for j, (prefix, count) in enumerate(((0, 1), (0, 7), (3 * topk + 5, 1), (64 * topk, 3))):
            news = [rows // count] * (count - 1) + [rows - rows // count * (count - 1)]
            shapes.append((i % 2 + j % 2, Batch.extend([prefix] * count, news)))
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    order = Random(0)
    return [batch for _, _, batch in sorted((r, order.random(), b) for r, b in shapes)]


def _contexts(random: Random, rows: int, longest: int) -> list[int]:
    """`rows` contexts of up to 8 lengths from half of `longest`."""
    lengths = [random.randint(longest // 2 + 1, longest) for _ in range(min(rows, 8))]
    return [lengths[i * len(lengths) // rows] for i in range(rows)]


def _sample(setting: Setting, random: Random) -> Batch:
    """A random decode of up to 1024 rows, or an extend whose rows fill a bucket of the grid."""
    topk = setting.profile.index_topk
    if random.random() < 0.5:
        rows = random.choice(_DECODED)
        longest = round(exp(random.uniform(log(topk / 2), log(64 * topk))))
        return Batch.decode(_contexts(random, rows, longest))
    # Rows of a bucket that is compiled already.
    rows = random.choice(_EXTENDED[:3]) - random.randint(0, 7)
    return Batch.extend([random.randint(0, 16 * topk)], [rows])


_ANY = frozenset(KVLayout)

INDEXER_METADATA = Point(
    name="indexer_metadata",
    modes=frozenset(Mode),
    arms=(
        Arm(
            "deep_gemm", _build_deep_gemm, _ANY, "deep_gemm", frozenset({"sm90", "sm100"}),
            (guards.SOME_ROWS, guards.MQA_SHAPE, guards.METADATA_ROWS),
        ),
        Arm("triton", _build_triton, _ANY, archs=ANY_GPU, guards=(guards.SOME_ROWS,)),
        Arm("torch", _build_torch, _ANY, reference=True),
    ),
    answers=(
        Answer(
            "indexer_metadata",
            {"deep_gemm": ("deep_gemm",), "triton": ("triton",), "torch": ("torch",)},
        ),
    ),
    terms=("rows", "warps_of_rows"),
    cost_terms=_cost_terms,
    coordinates=("rows", "mean_context"),
    locate=_locate,
    sheet=lambda batch, setting: 0,
    grid=_grid,
    case=_case,
    sample=_sample,
)  # fmt: skip
