"""Decision point `prefill`: expanded MHA or absorbed MLA, and by which kernel.

An arm is everything that only its way costs in one layer. MHA reads the prefix back, runs
kv_b_proj over all kv tokens, builds the keys and runs dense attention. MLA absorbs q, reads back
what its kernel needs, runs sparse attention and projects to v. Without any prefix nothing is read
back: the new tokens' bf16 latents are at hand, except for the kernels that read the pool itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_tune.backend.points import guards
from nsa_tune.backend.points.prefill import batches, mha, mla
from nsa_tune.backend.points.prefill import terms as work
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Answer, Arm, Case, Point, Setting

if TYPE_CHECKING:
    import torch

__all__ = ["PREFILL"]


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    from nsa_tune.backend.points.prefill.case import prefill_case

    return prefill_case(batch, setting, device)


_ANY = frozenset({KVLayout.BF16, KVLayout.FP8_PACKED})
_PACKED = frozenset({KVLayout.FP8_PACKED})
_HOPPER = frozenset({"sm90"})
_BLACKWELL = frozenset({"sm100", "sm103"})
_FLASHMLA = frozenset({"sm90", "sm100"})
_DENSE = (guards.SOME_ROWS, guards.DENSE_EXACT, guards.CHUNK_CAPACITY, guards.NOT_CAPTURED)
_SPARSE_FWD = (
    guards.SOME_ROWS,
    guards.FLASHMLA_SHAPE,
    guards.SPARSE_FWD_OFFSETS,
    guards.SPARSE_FWD_BYTES,
    guards.WIDENED_BYTES,
    guards.multiple_of_topk(
        128, "flash_mla_sparse_fwd", "FlashMLA csrc/sm90/prefill/sparse/phase1.cuh:577"
    ),
)
_DECODE_KERNEL = (
    guards.SOME_ROWS,
    guards.FLASHMLA_SHAPE,
    guards.FLASHMLA_SCHEDULE,
    guards.FLASHMLA_OFFSETS,
    guards.FLASHMLA_SCRATCH,
    guards.multiple_of_topk(
        64, "flash_mla_with_kvcache", "FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh:689"
    ),
)

_MHA = (
    Arm(
        "mha/fa3", mha.build_fa3, _ANY, "flashinfer", _HOPPER,
        (*_DENSE, guards.RAGGED_SHAPE, guards.FA3_WORKS), terms=work.OF_FA3,
    ),
    Arm(
        "mha/trtllm_ragged", mha.build_trtllm_ragged, _ANY, "flashinfer", _BLACKWELL,
        (*_DENSE, guards.RAGGED_SHAPE, guards.TRTLLM_RAGGED_WORKSPACE), terms=work.OF_FA3,
    ),
    Arm(
        "mha/fa2", mha.build_fa2, _ANY, "flashinfer", ANY_GPU,
        (*_DENSE, guards.RAGGED_SHAPE, guards.FA2_WORKS), terms=work.OF_FA2,
    ),
    Arm("mha/sdpa", mha.build_torch, _ANY, archs=ANY_GPU, guards=_DENSE, terms=work.OF_SDPA),
    Arm("mha/torch", mha.build_torch, _ANY, guards=_DENSE, reference=True, terms=work.OF_SDPA),
)  # fmt: skip
_MLA = (
    Arm(
        "mla/flashmla_sparse", mla.build_flashmla_sparse, _ANY, "flash_mla", _FLASHMLA, _SPARSE_FWD,
        terms=work.OF_MLA,
    ),
    Arm(
        "mla/flashmla_kv", mla.build_flashmla_kv, _PACKED, "flash_mla", _FLASHMLA, _DECODE_KERNEL,
        surcharge_us=guards.schedule_surcharge_us, terms=work.OF_FLASHMLA_KV,
    ),
    Arm(
        # Not where FlashMLA runs: so many times slower there that a sweep would be mostly its time.
        "mla/triton", mla.build_triton, _ANY, archs=ANY_GPU - _FLASHMLA,
        guards=(guards.SOME_ROWS, guards.TRITON_SHAPE), terms=work.OF_MLA,
    ),
    Arm("mla/torch_sparse", mla.build_torch_sparse, _ANY, reference=True, terms=work.OF_MLA),
    Arm("mla/torch_kv", mla.build_torch_kv, _PACKED, reference=True, terms=work.OF_MLA),
)  # fmt: skip


def _kernels(arms: tuple[Arm, ...]) -> dict[str, tuple[str, ...]]:
    """Each arm as a choice of its own, by what follows the path in its name."""
    return {arm.name.partition("/")[2]: (arm.name,) for arm in arms}


PREFILL = Point(
    name="prefill",
    modes=frozenset({Mode.EXTEND}),
    arms=(*_MHA, *_MLA),
    answers=(
        Answer(
            "prefill_path",
            {
                "mha": tuple(arm.name for arm in _MHA),
                "mla": tuple(arm.name for arm in _MLA),
            },
        ),
        Answer("mha_kernel", _kernels(_MHA)),
        # Also read when mha won: under graph capture an engine can take mla only.
        Answer("sparse_prefill", _kernels(_MLA)),
    ),
    terms=work.TERMS,
    cost_terms=work.cost_terms,
    term_bounds=work.term_bounds,
    coordinates=work.COORDINATES,
    locate=work.locate,
    sheet=lambda batch, setting: int(batch.prefix_tokens > 0),
    grid=batches.grid,
    case=_case,
    sample=batches.sample,
)
