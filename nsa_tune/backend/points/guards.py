"""Hard limits of the kernels, each with its source. A table never overrides one of these.

Formulas take the device's own attributes and the version of the library that answers; a limit
that a probe found counts where it is smaller. A limit that cannot be evaluated (an unknown build
without a probe, an unknown device) forbids the arm.
"""

from __future__ import annotations

from nsa_tune.backend.libraries.deep_gemm.limits import (
    METADATA_ROWS,
    MQA_LOGITS_BYTES,
    MQA_SHAPE,
    NEXT_N_SM90,
    metadata_rows,
)
from nsa_tune.backend.libraries.flash_mla.limits import (
    FLASHMLA_OFFSETS,
    FLASHMLA_SCHEDULE,
    FLASHMLA_SCRATCH,
    FLASHMLA_SHAPE,
    SCHEDULE_BUILDS,
    SPARSE_FWD_BYTES,
    SPARSE_FWD_OFFSETS,
    WIDENED_BYTES,
    multiple_of_topk,
    padded_heads,
    schedule_build,
    schedule_rows,
    schedule_surcharge_us,
    split_parts,
)
from nsa_tune.backend.libraries.flashinfer.limits import (
    FA2_WORKS,
    FA3_WORKS,
    RAGGED_SHAPE,
    TRTLLM_RAGGED_WORKSPACE,
    TRTLLM_SPARSE_SHAPE,
    WORKSPACE_BYTES,
    WORKSPACE_BYTES_TRTLLM,
)
from nsa_tune.backend.libraries.probed import PROBED, bound
from nsa_tune.backend.points.limits import (
    CHUNK_CAPACITY,
    DENSE_EXACT,
    NOT_CAPTURED,
    SELECTION_BYTES,
    SOME_ROWS,
    TRITON_SHAPE,
)

__all__ = [
    "CHUNK_CAPACITY",
    "DENSE_EXACT",
    "FA2_WORKS",
    "FA3_WORKS",
    "FLASHMLA_OFFSETS",
    "FLASHMLA_SCHEDULE",
    "FLASHMLA_SCRATCH",
    "FLASHMLA_SHAPE",
    "METADATA_ROWS",
    "MQA_LOGITS_BYTES",
    "MQA_SHAPE",
    "NEXT_N_SM90",
    "NOT_CAPTURED",
    "PROBED",
    "RAGGED_SHAPE",
    "SCHEDULE_BUILDS",
    "SELECTION_BYTES",
    "SOME_ROWS",
    "SPARSE_FWD_BYTES",
    "SPARSE_FWD_OFFSETS",
    "TRITON_SHAPE",
    "TRTLLM_RAGGED_WORKSPACE",
    "TRTLLM_SPARSE_SHAPE",
    "WIDENED_BYTES",
    "WORKSPACE_BYTES",
    "WORKSPACE_BYTES_TRTLLM",
    "bound",
    "metadata_rows",
    "multiple_of_topk",
    "padded_heads",
    "schedule_build",
    "schedule_rows",
    "schedule_surcharge_us",
    "split_parts",
]
