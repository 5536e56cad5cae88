"""The points of dense MLA: every arm computes attention over all keys, by chunks and pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flashinfer import calls as flashinfer
from nsa_tune.backend.libraries.sglang import calls as sglang
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.points.attention_case import DenseCase, prefill_case
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

PREFILL, DECODE = POINTS["dense_prefill"], POINTS["dense_decode"]
CPU = torch.device("cpu")
TINY = Setting(
    profile_of("tiny-mla"), 4, KVLayout.BF16, Device("CPU", "cpu"), max_chunk_kv=300
)  # fmt: skip
"""Prefixes of more than 300 tokens are expanded in chunks."""
H200 = Setting(
    profile_of("deepseek-v3"), 16, KVLayout.BF16, KNOWN["NVIDIA H200"], {"sgl-flash-mla": "1.0.0"}
)
EXTENDS = [
    Batch.extend([0], [300]),
    Batch.extend([512, 0, 300], [64, 33, 5]),
    Batch.extend([100] * 3, [40] * 3),
]
DECODES = [Batch.decode([300, 129, 64]), Batch.verify([40, 700], 2)]


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [queries, heads, v] and lse [heads, queries] of one sequence."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scale
    if causal:
        last = torch.arange(len(q))[:, None] + len(keys) - len(q)
        scores = scores.masked_fill(torch.arange(len(keys)) > last, -torch.inf)
    lse = scores.logsumexp(-1)
    # A sequence without keys has no weights: 0, as kernels give.
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype), lse


def fa3_varlen(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, starts_q: torch.Tensor,
    starts_kv: torch.Tensor, longest: tuple[int, int], scale: float, *, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert longest == (int(starts_q.diff().max()), int(starts_kv.diff().max()))
    ends = zip(starts_q.tolist(), starts_kv.tolist(), strict=True)
    parts, last = [], next(ends)
    for end in ends:
        rows, tokens = slice(last[0], end[0]), slice(last[1], end[1])
        parts.append(attend(q[rows], keys[tokens], values[tokens], scale, causal))
        last = end
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def fa3_absorbed(
    nope: torch.Tensor, rope: torch.Tensor, pool: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, starts_q: torch.Tensor, longest: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    assert longest == int(starts_q.diff().max())
    page, parts = pool.shape[1], []
    for i, length in enumerate(lengths.tolist()):
        token = torch.arange(length)
        slots = table[i, token // page].long() * page + token % page
        keys = pool.flatten(0, 1)[slots][:, None].expand(-1, nope.shape[1], -1)
        rows = slice(int(starts_q[i]), int(starts_q[i + 1]))
        q = torch.cat((nope[rows], rope[rows]), -1)
        parts.append(attend(q, keys, keys[..., : nope.shape[-1]], scale, True)[0])
    return torch.cat(parts)


def dense_decode(
    q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float,
    schedule: object,
) -> torch.Tensor:  # fmt: skip
    sequences, queries = q.shape[:2]
    nope, rope = q.flatten(0, 1)[..., :128], q.flatten(0, 1)[..., 128:]
    starts = torch.arange(sequences + 1) * queries
    out = fa3_absorbed(nope, rope, pool[:, :, 0], table, lengths, starts, queries, scale)
    return out.view(sequences, queries, *out.shape[1:])


def triton_decode(
    q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor, starts: torch.Tensor,
    slots: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor], splits: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    rank, (partial, sums) = out.shape[-1], scratch
    assert partial.shape == (*sums.shape, rank)
    assert sums.shape[:2] == q.shape[:2]
    for i, part in enumerate(slots.long().split(starts.diff().tolist())):
        keys = pool[part].expand(-1, q.shape[1], -1)
        out[i] = attend(q[i : i + 1], keys, keys[..., :rank], scale, False)[0][0]


class MlaWrapper:
    """FlashInfer's, over pages of one token."""

    def __init__(self, device: object, backend: str) -> None:
        assert backend == "fa2"

    def plan(self, **given: Any) -> None:
        self.given = given

    def run(
        self, nope: torch.Tensor, rope: torch.Tensor, latents: torch.Tensor, ropes: torch.Tensor
    ) -> torch.Tensor:
        given = self.given
        assert given["page_size"] == 1
        starts, slots = given["kv_indptr"].tolist(), given["kv_indices"]
        lengths = given["kv_len_arr"]
        table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32)
        for i, length in enumerate(lengths.tolist()):
            table[i, :length] = slots[starts[i] : starts[i + 1]]
        starts_q, pool = given["qo_indptr"], torch.cat((latents, ropes), -1)
        longest = int(starts_q.diff().max())
        return fa3_absorbed(nope, rope, pool, table, lengths, starts_q, longest, given["sm_scale"])


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' edges, computed in torch."""
    monkeypatch.setattr(sglang_kernel, "fa3_varlen", fa3_varlen)
    monkeypatch.setattr(sglang_kernel, "fa3_absorbed", fa3_absorbed)
    monkeypatch.setattr(flash_mla, "dense_decode", dense_decode)
    monkeypatch.setattr(flash_mla, "new_schedule", lambda: None)
    monkeypatch.setattr(flashinfer, "mla_wrapper", MlaWrapper)
    monkeypatch.setattr(sglang, "triton_decode", triton_decode)
    monkeypatch.setattr(sglang, "triton_splits", lambda *given: None)


def runs() -> Iterator[tuple[Point, str, Batch]]:
    dense = ("mha/sgl_fa3", "mha/sgl_fa3_merged", "mha/torch")
    for point, batches in ((PREFILL, EXTENDS), (DECODE, DECODES)):
        for arm in point.arms:
            if arm.name in dense or not arm.name.startswith("mha/"):
                for batch in batches:
                    of_batch = [guard for guard in arm.guards if guard.kind == "semantic"]
                    if not any(guard.check(batch, TINY) for guard in of_batch):
                        yield point, arm.name, batch


def short(value: Point | str | Batch) -> str:
    """A name that is the same in every process: a point's repr has addresses."""
    return value.name if isinstance(value, Point) else str(value)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("point", "name", "batch"), list(runs()), ids=short)
def test_every_arm_computes_the_reference(point: Point, name: str, batch: Batch) -> None:
    case = prefill_case(batch, TINY, CPU)
    output = point.arm(name).build(case)()

    assert output.shape == (batch.q_tokens, 4, 32)
    assert case.error_of(output) < case.tolerance


def test_a_key_that_is_left_out_is_an_error() -> None:
    case = prefill_case(Batch.extend([0], [8]), TINY, CPU)
    assert isinstance(case, DenseCase)
    case.positions[-1] -= 1
    output = PREFILL.arm("mla/torch").build(case)()
    whole = prefill_case(Batch.extend([0], [8]), TINY, CPU)

    assert whole.error_of(output) > whole.tolerance


def test_a_model_without_an_indexer_asks_nothing_of_one() -> None:
    assert points_for(profile_of("kimi-k2")) == [PREFILL, DECODE]


def test_what_absorbed_kernels_share_out_counts_whole_tiles_of_heads() -> None:
    functions = DECODE.features(H200)

    def terms(batch: Batch) -> dict[str, float]:
        return dict(zip(functions.names, functions.features(batch), strict=True))

    # 16 heads: 4 queries fill a tile of 64.
    verify, decode = terms(Batch.verify([4096] * 133, 4)), terms(Batch.decode([4096] * 133))
    assert verify["flashinfer_busiest_keys"] == decode["flashinfer_busiest_keys"] > 2 * 4096
    few, many = terms(Batch.decode([65536])), terms(Batch.decode([65536] * 200))
    # A single tile is split over the SMs, 200 tiles are not.
    assert few["absorbed_busiest_keys"] < 65536 / 32
    assert few["absorbed_merged_rows"] > 32
    assert many["absorbed_busiest_keys"] >= 65536
    assert many["absorbed_merged_rows"] == 0


def test_absorbed_kernels_share_a_batch_by_schedules_of_their_own() -> None:
    functions = PREFILL.features(H200)

    def terms(batch: Batch) -> dict[str, float]:
        return dict(zip(functions.names, functions.features(batch), strict=True))

    # 297 tiles of FlashMLA on 132 SMs: the last ones, which see the most keys, begin late.
    late = terms(Batch.extend([16] * 12, [1187] * 12))
    assert late["flash_mla_busiest_keys"] > 1.3 * late["flashinfer_busiest_keys"]
    # 80 tiles leave 52 SMs idle, and each goes through all sequences.
    idle = terms(Batch.extend([0] * 22, [320] * 22))
    assert idle["flash_mla_busiest_keys"] >= 22 * 320
    assert idle["flashinfer_busiest_keys"] < idle["flash_mla_busiest_keys"] / 2
    long = terms(Batch.extend([32768], [1]))
    # FlashMLA gives a part 4 of 513 blocks, FlashInfer a piece of 256 keys; each takes as long as
    # 96 keys more.
    assert long["flash_mla_busiest_keys"] == 256 + 96
    assert (long["flashinfer_busiest_keys"], long["flashinfer_parts"]) == (256 + 96, 129)
    # So many sequences are not split, however unequal: one of them decides.
    ragged = Batch.extend([6000, *[100] * 119], [4] * 120)
    assert terms(ragged)["absorbed_busiest_keys"] >= 6000
    # Of one query each they count as 30 tiles of 64 (query, head) pairs.
    assert terms(Batch.extend([6000, *[100] * 119], [1] * 120))["absorbed_busiest_keys"] < 2000
    # FlashAttention-3 splits by the rows of all sequences: 454 new tokens alone are few enough.
    mixed = terms(Batch.extend([7322, *[100] * 20], [454, *[50] * 20]))
    assert (mixed["absorbed_parts"], mixed["absorbed_merged_rows"]) == (0, 0)
    assert terms(Batch.extend([7322], [354]))["absorbed_parts"] > 1
    # Equal ones end together, in whole waves; of others the longest come first.
    assert terms(Batch.extend([6000] * 133, [4] * 133))["absorbed_busiest_keys"] >= 2 * 6000
    assert terms(Batch.extend([6000, *[100] * 500], [4] * 501))["absorbed_busiest_keys"] < 6200
    # FlashInfer keeps the batch's order: a long one that comes last begins late.
    first, last = Batch.extend([6484, 6], [61, 1743]), Batch.extend([6, 6484], [1743, 61])
    assert terms(last)["flashinfer_busiest_keys"] > 1.3 * terms(first)["flashinfer_busiest_keys"]
    # 80 blocks and 10 more on 132 SMs: pieces of one block each, 40 of either sequence.
    halves = terms(Batch.extend([2559] * 2, [1] * 2))
    assert (halves["flash_mla_parts"], halves["flash_mla_merged_rows"]) == (40, 80)
    assert terms(ragged)["flashinfer_busiest_keys"] < 6000 / 2
    # 26 sequences of 1229 keys are 5 pieces of 256 each, 130 in all: one wave.
    assert terms(Batch.extend([1225] * 26, [4] * 26))["flashinfer_busiest_keys"] == 256 + 96


def test_flash_mlas_fullest_part_is_that_of_its_schedule() -> None:
    functions = DECODE.features(replace(H200, heads=128))

    def busiest(batch: Batch) -> float:
        return functions.by_name(batch)["flash_mla_busiest_keys"]

    # 33 parts of 9 of 275 blocks and 5 more: each of 5 sequences of 50 blocks begins one of its
    # own, as what is left of the last one's is too little to begin another.
    assert busiest(Batch.verify([3179] * 5, 2)) == 9 * 64 + 96
    # 132 sequences on 66 parts: 13 blocks each, so two whole ones of one block and 5 more.
    assert busiest(Batch.decode([64] * 132)) == 2 * (64 + 96)


def test_fa3s_of_two_libraries_deal_tiles_in_orders_of_their_own() -> None:
    functions = PREFILL.features(replace(H200, heads=8))

    def busiest(batch: Batch) -> tuple[float, float]:
        found = functions.by_name(batch)
        return found["sgl_fa3_busiest_pairs"], found["flashinfer_fa3_busiest_pairs"]

    # 25 tiles of 8 heads on 132 SMs: of all heads the longest first, or one head after the other.
    sglang, flashinfer = busiest(Batch.extend([0], [3170]))
    assert 3000 * 128 < sglang < 0.9 * flashinfer
    # A tile an SM: the longest decides.
    assert busiest(Batch.extend([64, 3000], [128, 128])) == (3128 * 128,) * 2
    # Very many are not dealt one by one.
    many = busiest(Batch.extend([100] * 40, [900] * 40))
    assert many[0] == many[1]


@pytest.mark.parametrize("point", [PREFILL, DECODE])
def test_random_batches_may_run_and_differ(point: Point) -> None:
    batches = [point.sample(H200, Random(seed)) for seed in range(40)]
    absorbed = [arm for arm in point.arms if arm.choice == "fa3_paged"]

    assert len(set(batches)) == 40
    assert all(batch.mode in point.modes for batch in batches)
    assert not any(arm.allowed(batch, H200) for arm in absorbed for batch in batches)
    assert any(len({*(batch.kv_lens or ())}) > 1 for batch in batches)


def test_flashmla_takes_equally_many_queries_only() -> None:
    arm = PREFILL.arm("mla/flashmla")

    assert arm.allowed(Batch.extend([100, 7], [4, 4]), H200) is None
    assert "equally many" in (arm.allowed(Batch.extend([100, 7], [4, 5]), H200) or "")


def test_sglangs_triton_decode_takes_one_query_of_each() -> None:
    arm = DECODE.arm("triton")

    assert arm.allowed(Batch.decode([100, 7]), H200) is None
    assert "prefill kernel" in (arm.allowed(Batch.verify([100, 7], 2), H200) or "")


def test_flashinfers_plan_has_room_for_so_many_tiles() -> None:
    arm, wide = DECODE.arm("flashinfer"), replace(H200, heads=128)

    assert arm.allowed(Batch.decode([100] * 4096), wide) is None
    assert "work items" in (arm.allowed(Batch.decode([100] * 16384), wide) or "")


def test_a_prefix_beyond_the_chunk_capacity_is_expanded_in_chunks_only() -> None:
    batch = Batch.extend([200_000], [64])

    assert "chunk capacity" in (PREFILL.arm("mha/sgl_fa3").allowed(batch, H200) or "")
    assert PREFILL.arm("mha/sgl_fa3_merged").allowed(batch, H200) is None
