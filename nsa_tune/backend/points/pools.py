"""What sparse attention arms read, and how they get at the tokens of other pools."""

from __future__ import annotations

from collections.abc import Mapping

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import CONVERSIONS, Conversion, KVLayout, Role
from nsa_tune.backend.types.point import SparseArm

READS: Mapping[str, frozenset[KVLayout]] = {
    arm.choice: arm.reads
    for point in POINTS.values()
    for arm in point.arms
    if isinstance(arm, SparseArm)
}
"""By an arm's name without the path, the layouts that its kernel itself reads."""


def reach(name: str, pool: KVLayout, role: Role) -> tuple[Conversion | None, ...]:
    """How `name` gets at tokens of `pool`: (None,) as they are, else the conversions that do."""
    if pool in READS[name]:
        return (None,)
    return tuple(
        conversion
        for conversion in CONVERSIONS
        if conversion.source is pool and name in conversion.readers and role in conversion.roles
    )
