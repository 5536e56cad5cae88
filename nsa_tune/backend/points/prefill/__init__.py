"""Decision point `prefill`: expanded MHA or absorbed MLA, and by which kernel.

An arm's time is everything that only this way costs in one layer. MHA reads the prefix back, runs
kv_b_proj over all kv tokens, builds the keys and runs dense attention. MLA absorbs q, reads back
what its kernel needs, runs sparse attention and projects to v. Without a prefix nothing is read
back, because the new tokens' bf16 latents are at hand; only kernels that read the pool do so.
"""

from __future__ import annotations

from nsa_tune.backend.points.prefill import batches, features
from nsa_tune.backend.points.prefill.arms import MHA, MLA
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.point import Arm, Point, Question, case_in


def questions(mha: tuple[Arm, ...], mla: tuple[Arm, ...], mla_kernel: str) -> tuple[Question, ...]:
    """The path, and each path's kernel, among whose arms each is a choice of its own."""
    paths = {"mha": mha, "mla": mla}
    return (
        Question("prefill_path", {path: tuple(a.name for a in paths[path]) for path in paths}),
        Question("mha_kernel", {arm.choice: (arm.name,) for arm in mha}),
        # Also read when mha won: under graph capture an engine can take mla only.
        Question(mla_kernel, {arm.choice: (arm.name,) for arm in mla}),
    )


PREFILL = Point(
    name="prefill",
    modes=frozenset({Mode.EXTEND}),
    arms=(*MHA, *MLA),
    questions=questions(MHA, MLA, "sparse_prefill"),
    features=features.features,
    grid=batches.grid,
    case=case_in("attention_case", "prefill_case"),
    sample=batches.sample,
)
