"""Work: the least that an arm must compute and move for a batch.

Every input, every intermediate result that goes through memory, and the output count once. Repeated
reads after cache misses and work on padding do not count, so an arm's achieved rates are lower
bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.schedules import attended_pairs
from nsa_tune.backend.points.v4_prefill import features as v4
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

_BF16 = 2
_FP32 = 4
_INT32 = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Flops (a multiplication and an addition are two) and bytes."""

    flops: float
    moved: float
    """Bytes to and from memory."""
    precision: str
    """Input type of the matrix products: "bf16" or "fp8"."""


def work_of(point: str, arm: str, batch: Batch, setting: Setting) -> Work | None:
    """The work of `arm` of `point`; None for arms that are not described here."""
    describe = _POINTS.get(point) or _WAYS.get((point, arm.partition("/")[0]))
    return None if describe is None else describe(batch, setting)


def _ends(batch: Batch, setting: Setting, read: int) -> float:
    """Bytes that both MHA and MLA prefill move: queries, outputs, kv_b_proj's weights, and `read`
    tokens of the KV pool."""
    profile, heads = setting.profile, setting.heads
    token = setting.layout.token_bytes(profile.rank, profile.rope)
    # Without a prefix nothing is read from the pool: the new tokens' latents are still in bf16.
    latent = token if batch.prefix_tokens else KVLayout.BF16.token_bytes(profile.rank, profile.rope)
    queries = batch.q_tokens * heads * (profile.nope + profile.rope + profile.v) * _BF16
    weights = profile.rank * heads * (profile.nope + profile.v) * _BF16
    return queries + weights + read * latent


def _mha(batch: Batch, setting: Setting) -> Work:
    profile, heads = setting.profile, setting.heads
    width = profile.nope + profile.rope + profile.v
    expand = 2 * batch.kv_tokens * profile.rank * heads * (profile.nope + profile.v)
    attend = 2 * batch.pairs * heads * width
    # Keys and values are written, and read by the attention kernel.
    expanded = 2 * batch.kv_tokens * heads * width * _BF16
    return Work(expand + attend, _ends(batch, setting, batch.kv_tokens) + expanded, "bf16")


def _mla(batch: Batch, setting: Setting) -> Work:
    profile, heads = setting.profile, setting.heads
    project = 2 * batch.q_tokens * heads * profile.rank * (profile.nope + profile.v)
    attended = int(attended_pairs(batch, profile.index_topk))
    attend = 2 * attended * heads * (profile.latent + profile.rank)
    # Absorbed queries and attention outputs in latent space are written and read again.
    between = 2 * batch.q_tokens * heads * (profile.latent + profile.rank) * _BF16
    read = min(batch.kv_tokens, attended)
    return Work(project + attend, _ends(batch, setting, read) + between, "bf16")


def _indexer(batch: Batch, setting: Setting) -> Work:
    profile = setting.profile
    flops = 2 * batch.pairs * profile.index_heads * profile.index_dim
    keys = batch.kv_tokens * (profile.index_dim + _FP32)
    queries = batch.q_tokens * profile.index_heads * (profile.index_dim + _FP32)
    return Work(flops, keys + queries + batch.pairs * _FP32, "fp8")


def _gathered_indexer(batch: Batch, setting: Setting) -> Work:
    """The same over keys that are gathered first: written, and read by the logits kernel."""
    work, profile = _indexer(batch, setting), setting.profile
    gathered = 2 * batch.kv_tokens * (profile.index_dim + _FP32)
    return replace(work, moved=work.moved + gathered)


def _topk(batch: Batch, setting: Setting) -> Work:
    """No matrix product: each score is read and compared once, and the places are written."""
    places = batch.q_tokens * (setting.profile.index_topk + 1) * _INT32
    return Work(batch.pairs, batch.pairs * _FP32 + places, "bf16")


def _schedule(batch: Batch, setting: Setting) -> Work:
    """No matrix product: each row's context is divided into splits, which are summed."""
    rows = batch.q_tokens
    return Work(2 * rows, rows * _INT32 + (setting.device.sms + 1) * 2 * _INT32, "bf16")


def _v4(name: str, batch: Batch, setting: Setting) -> Work:
    """One layer of `name`'s compression ratio. All heads share one latent, as key and value."""
    profile, heads = setting.profile, setting.heads
    ratio = int(name.rpartition("_c")[2])
    attended = v4.attended_pairs(batch, profile, ratio)
    read = min(v4.gathered_tokens(batch, profile.window, ratio), attended)
    latents = read * setting.layout.token_bytes(profile.rank, profile.rope)
    queries = batch.q_tokens * heads * (profile.latent + profile.v) * _BF16
    columns = profile.window + v4.extra_width(profile, ratio, batch.max_kv)
    indices = batch.q_tokens * columns * _INT32
    return Work(
        2 * attended * heads * (profile.latent + profile.v), latents + queries + indices, "bf16"
    )


_POINTS: dict[str, Callable[[Batch, Setting], Work]] = {
    "decode": _mla, "dense_decode": _mla, "indexer_layout": _indexer, "indexer_metadata": _schedule,
    "indexer_topk": _topk,
    **{name: partial(_v4, name) for name, point in POINTS.items() if point.group == "v4_prefill"},
}  # fmt: skip
_WAYS: dict[tuple[str, str], Callable[[Batch, Setting], Work]] = {
    ("prefill", "mha"): _mha, ("prefill", "mla"): _mla,
    ("dense_prefill", "mha"): _mha, ("dense_prefill", "mla"): _mla,
    ("indexer_prefill", "ragged"): _gathered_indexer,
    ("indexer_prefill", "chunked"): _gathered_indexer, ("indexer_prefill", "paged"): _indexer,
    ("indexer_prefill", "torch"): _gathered_indexer,
}  # fmt: skip
"""By the point and the part of an arm's name before "/"."""
