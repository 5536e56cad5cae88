"""Plan: every decision for one batch. The engine reads it; the reasons are made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple, Protocol

from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import SparseArm
from nsa_tune.backend.types.records import Key


class Row(NamedTuple):
    """A measurement that an estimate is interpolated from."""

    batch: str
    arm: str
    latency_us: float
    weight: float
    """Its part in the interpolation; those of one arm sum to 1."""
    pass_us: float | None = None
    """What it takes once a pass, whose share is in `latency_us`; None where nothing is shared."""


class Consulted(NamedTuple):
    """A guard that was asked about an arm."""

    arm: str
    guard: str
    kind: str
    """"formula", "probe" or "semantic"."""
    source: str
    """Where the limit is written down."""
    reason: str | None
    """How the batch passes the limit; None while the arm is allowed."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one field of a plan has its value. Mappings go by choice."""

    verdict: Verdict
    source: str
    """The table, the engine's baseline, or the limit that decided."""
    estimates_us: Mapping[str, float]
    """Microseconds of each allowed choice's best arm."""
    intervals_us: Mapping[str, tuple[float, float]]
    """95 % intervals of these."""
    guards: Mapping[str, str]
    """Forbidden choices, and why."""
    text: str
    """One sentence."""
    expected_regret: float | None = None
    """Relative loss to be expected, as the estimates are uncertain; None without two of them."""
    to_win: Mapping[str, str] = field(default_factory=dict)
    """Other choices, and what would have to change for them to be taken."""
    key: Key | None = None
    """What the measurements are valid for; None when none decided."""
    rows: tuple[Row, ...] = ()
    """The measurements behind the estimates."""
    consulted: tuple[Consulted, ...] = ()
    """The guards that were asked, for each arm up to the first that forbids it."""


class Origin(Protocol):
    """Who made a plan and can say why."""

    def names(self, plan: Plan) -> tuple[str, ...]:
        """The fields of `plan` that have a reason."""

    def reason(self, plan: Plan, name: str) -> Reason:
        """Why the field `name` of `plan` has its value."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision for one batch.

    None means that the field does not apply to the batch's mode, or that every choice is
    forbidden; the engine then keeps its own.
    """

    batch: Batch
    prefill_path: str | None
    """"mha" (expanded, dense) or "mla" (absorbed; sparse where the model has an indexer); None
    unless in extend."""
    mha_kernel: str | None
    """The dense kernel, should the path be mha: "fa3", ..."""
    sparse_prefill: str | None
    """The sparse kernel, should the path be mla: "flashmla_sparse", "flashmla_kv", ...; None in a
    model without an indexer."""
    indexer_layout: str | None
    """"native", "pairs" or "flatten"; None in extend."""
    decode: str | None
    """The kernel that decodes: "flashmla_kv", "flashmla_sparse", ...; None in extend."""
    indexer_metadata: str | None
    """Who schedules the indexer's paged logits, where they are: "deep_gemm" or "triton"."""
    indexer_prefill: str | None
    """How the indexer scores keys: "ragged", "paged" or "chunked"; None unless in extend, and where
    every token is selected anyway."""
    indexer_topk: str | None
    """Who selects the keys: "sglang", "sampled" or "flashinfer"; None where all are."""
    topk_transform: str | None
    """"paged" or "ragged": how the indexer's top-k hands its indices to the sparse kernel."""
    dequantize_prefix: bool | None
    """Whether the fp8 prefix is read back to bf16; None unless in extend."""
    skip_topk: bool
    """Whether every token is selected anyway, so that no top-k need be computed."""
    _origin: Origin = field(repr=False, compare=False)
    v4_prefill_c4: str | None = None
    """In V4's layers of compression ratio 4: "sparse_fwd" or "with_kvcache"; None elsewhere."""
    v4_prefill_c128: str | None = None
    """The same in its layers of ratio 128."""
    layout_conversion: str | None = None
    """The kernel (below `nsa_tune.backend.kernels`) that turns what the attention reads of the pool
    into its own layout, as "packed_fp8.dequantize"; None where nothing is turned. V4's two
    prefill fields each say it by themselves."""
    absorbed_prefill: str | None = None
    """The kernel of a model without an indexer, should the path be mla: "fa3", ...; None
    elsewhere."""

    @property
    def reasons(self) -> Mapping[str, Reason]:
        """The reason of each field that applies, made on access."""
        return _Reasons(self, self._origin)


class _Reasons(Mapping[str, Reason]):
    """A plan's reasons, each made when it is looked at."""

    __slots__ = ("_names", "_origin", "_plan")

    def __init__(self, plan: Plan, origin: Origin) -> None:
        self._plan = plan
        self._origin = origin
        self._names = origin.names(plan)

    def __getitem__(self, name: str) -> Reason:
        if name not in self._names:
            raise KeyError(name)
        return self._origin.reason(self._plan, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- what follows from the tuned choices

DERIVED = ("topk_transform", "dequantize_prefix", "skip_topk", "layout_conversion")
"""The fields that follow from the batch and the other choices."""


class Derived(NamedTuple):
    """The derived fields of a plan."""

    topk_transform: str | None
    dequantize_prefix: bool | None
    skip_topk: bool
    layout_conversion: str | None = None


def facts_of(batch: Batch, index_topk: int) -> tuple[bool, bool]:
    """What the derived fields depend on besides the choices: whether there is a prefix, and
    whether no sequence is longer than index_topk."""
    return batch.kv_tokens > batch.q_tokens, batch.max_kv <= index_topk


@lru_cache(maxsize=1024)
def coupled(
    mode: Mode,
    layout: KVLayout,
    prefill_path: str | None,
    sparse_prefill: str | None,
    has_prefix: bool,
    within_topk: bool,
    decode: str | None = None,
) -> Derived:
    """The derived fields by `facts_of`, as SGLang 0.5.23 couples them.

    Its lines are dsa_backend.py:4101 (transform) and 1301 (dequantize), dsa_indexer.py:846 (skip).
    The top-k transform follows the prefill kernel in extend and the decode kernels, which are all
    paged, elsewhere: never one from the other.
    """
    if layout is KVLayout.V4_PAGED:
        # V4's layers differ, and `sparse_fwd` and `with_kvcache` each say both by themselves.
        return Derived(None, None, False)
    if mode is not Mode.EXTEND:
        return Derived("paged", None, False, _copy(decode, layout))
    copy = _copy(sparse_prefill, layout)
    transform = None if sparse_prefill is None else "paged" if copy is None else "ragged"
    # Dense kernels all read bf16. New tokens are at hand in bf16, and need no copy.
    dense = prefill_path == "mha" and layout is KVLayout.FP8_PACKED
    dequantize = None if prefill_path is None else has_prefix and (dense or copy is not None)
    conversion = (
        ("packed_fp8.dequantize" if prefill_path == "mha" else copy) if dequantize else None
    )
    return Derived(transform, dequantize, within_topk, conversion)


COPIES: Mapping[str, Mapping[KVLayout, str]] = {
    arm.choice: arm.copied
    for point in POINTS.values()
    for arm in point.arms
    if isinstance(arm, SparseArm)
}
"""By an arm's name without the path, `SparseArm.copied`."""


def _copy(reader: str | None, layout: KVLayout) -> str | None:
    """What copies tokens of `layout` for `reader`; None where it reads them as they are, or not at
    all."""
    return COPIES.get(reader or "", {}).get(layout)


# --- making plans

DECIDED = tuple(field.name for field in fields(Plan) if field.name not in ("batch", "_origin"))
"""The fields that are decisions, in the order of `Plan`."""
TUNED = tuple(name for name in DECIDED if name not in DERIVED)
"""Those of them that answer a question."""
