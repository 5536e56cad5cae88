"""The adapters' calls, with made-up libraries at the edge: no GPU is needed to get them right."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune import LibraryMissing
from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.sglang import calls as sglang
from nsa_tune.backend.libraries.sglang_kernel import calls as sglang_kernel


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    flash_mla._legacy_keywords.cache_clear()


def fake_flash_mla(calls: list[dict[str, Any]], *, switch: bool) -> SimpleNamespace:
    def with_kvcache(**keywords: Any) -> tuple[torch.Tensor, None]:
        calls.append(keywords)
        return keywords["q"], None

    def sparse(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, **keywords: Any
    ) -> tuple[torch.Tensor]:
        calls.append({"q": q, "kv": kv, "indices": indices, "scale": scale, **keywords})
        return (q,)

    def sparse_old(q: Any, kv: Any, indices: Any, scale: float, **keywords: Any) -> tuple[Any]:
        return sparse(q, kv, indices, scale, **keywords)

    def sparse_new(
        q: Any, kv: Any, indices: Any, scale: float, use_legacy: bool = False, **keywords: Any
    ) -> tuple[Any]:
        return sparse(q, kv, indices, scale, use_legacy=use_legacy, **keywords)

    def kvcache_new(*, use_legacy: bool = False, **keywords: Any) -> tuple[torch.Tensor, None]:
        return with_kvcache(use_legacy=use_legacy, **keywords)

    return SimpleNamespace(
        get_mla_metadata=lambda: (object(), None),
        flash_mla_sparse_fwd=sparse_new if switch else sparse_old,
        flash_mla_with_kvcache=kvcache_new if switch else with_kvcache,
    )


def use(monkeypatch: pytest.MonkeyPatch, *, switch: bool = True) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    module = fake_flash_mla(calls, switch=switch)
    monkeypatch.setattr(flash_mla, "_module", lambda: module)
    return calls


Q = torch.zeros(3, 64, 576, dtype=torch.bfloat16)
INDICES = torch.zeros(3, 1, 128, dtype=torch.int32)


def test_v32_and_v4_formats_take_the_legacy_kernels_where_there_is_a_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use(monkeypatch)
    flash_mla.sparse_forward(Q, Q, INDICES, 0.1, None)
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1, flash_mla.new_schedule())

    assert [call["use_legacy"] for call in calls] == [True, True]


def test_the_window_and_the_compressed_tokens_are_two_pools_of_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, schedule = use(monkeypatch), flash_mla.new_schedule()
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1, schedule, extra_k_cache=Q)

    (call,) = calls
    assert call["extra_k_cache"] is Q
    assert (call["block_table"], call["cache_seqlens"]) == (None, None)


def test_a_sink_is_passed_to_the_prefill_kernel_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use(monkeypatch)
    flash_mla.sparse_forward(Q, Q, INDICES, 0.1, None)
    flash_mla.sparse_forward(Q, Q, INDICES, 0.1, None, torch.zeros(64))

    assert [call.get("attn_sink") is None for call in calls] == [True, False]


def test_a_build_without_the_switch_is_called_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch, switch=False)
    flash_mla.sparse_forward(Q, Q, INDICES, 0.1, None)
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1, flash_mla.new_schedule())

    assert len(calls) == 2
    assert all("use_legacy" not in call for call in calls)


def test_layers_of_a_pass_share_the_schedule_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use(monkeypatch)
    schedule = flash_mla.new_schedule()
    for _ in range(2):
        flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1, schedule)
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1, flash_mla.new_schedule())

    first, second, third = [call["tile_scheduler_metadata"] for call in calls]
    assert first is second is schedule
    assert third is not schedule
    assert calls[0]["is_fp8_kvcache"] is True
    assert calls[0]["block_table"] is None
    assert calls[0]["head_dim_v"] == 512


def test_deep_gemm_is_called_with_the_schedule_of_its_own_sm_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []

    def metadata(lens: torch.Tensor, page: int, sms: int) -> torch.Tensor:
        seen.append((page, sms))
        return torch.zeros(sms + 1, 2)

    def logits(*arguments: Any, clean_logits: bool) -> torch.Tensor:
        seen.append((arguments[-1], clean_logits))
        return torch.zeros(1)

    module = SimpleNamespace(
        get_num_sms=lambda: 78, get_paged_mqa_logits_metadata=metadata, fp8_paged_mqa_logits=logits
    )
    monkeypatch.setattr(deep_gemm, "_module", lambda: module)
    one = torch.zeros(1)

    assert deep_gemm.schedule(one, 64).shape == (79, 2)
    deep_gemm.paged_mqa_logits(one, one, one, one, one, one, 4096)
    assert seen == [(64, 78), (4096, False)]


def use_sgl_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What sglang-kernel's functions are called with, each with its name first."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, function: str) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                seen.append(((f"{self.name}.{function}", *arguments), keywords))
                return keywords.get("qv", arguments[0] if arguments else None)

            return call

    monkeypatch.setattr(sglang_kernel, "_module", Module)
    return seen


NOPE = torch.zeros(3, 16, 512, dtype=torch.bfloat16)
ROPE = torch.zeros(3, 16, 64, dtype=torch.bfloat16)
POOL = torch.zeros(9, 576, dtype=torch.bfloat16)
PAGES = torch.zeros(3, 2048, dtype=torch.int32)


def test_fa3_reads_pages_of_one_token_with_the_selection_as_their_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = use_sgl_kernel(monkeypatch)
    lengths, starts = torch.ones(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    out = sglang_kernel.fa3_sparse(NOPE, ROPE, POOL, PAGES, lengths, starts, 0.1)

    (((name,), given),) = seen
    assert name == "sgl_kernel.flash_attn.flash_attn_with_kvcache"
    assert out.shape == given["qv"].shape == NOPE.shape
    assert given["q"] is ROPE
    assert given["page_table"] is PAGES
    assert given["k_cache"].shape == (9, 1, 1, 64)
    assert given["v_cache"].shape == (9, 1, 1, 512)
    # Both are views of the pool: latents first, rope behind them.
    assert given["v_cache"].data_ptr() == POOL.data_ptr()
    assert given["k_cache"].data_ptr() == POOL.data_ptr() + 512 * POOL.element_size()
    assert (given["cache_seqlens"], given["cu_seqlens_q"]) == (lengths, starts)
    assert (given["max_seqlen_q"], given["causal"], given["softmax_scale"]) == (1, True, 0.1)


def test_sglangs_triton_kernel_gets_the_group_that_shares_a_union(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def prefill(*given: Any, **named: Any) -> torch.Tensor:
        seen.append((given, named))
        return NOPE

    module = SimpleNamespace(sparse_mla_prefill=prefill)
    monkeypatch.setattr(sglang, "_module", {"sglang_triton": module}.__getitem__)
    q, lengths = torch.ones(3, 16, 576, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int32)

    assert sglang.triton_sparse(q, POOL, PAGES, 0.1, 512, lengths, 2) is NOPE
    ((given, named),) = seen
    assert given[0] is q and given[1] is POOL and given[2] is PAGES and given[3:] == (0.1, 512)
    assert named == {"topk_length": lengths, "union": 2}


def test_sglangs_triton_decode_reads_values_where_the_keys_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []
    module = SimpleNamespace(decode_attention_fwd=lambda *given, has_mla: seen.append(given))
    monkeypatch.setattr(sglang, "_module", {"sglang_triton_decode": module}.__getitem__)
    pool, out = torch.ones(9, 1, 576), torch.zeros(2, 16, 512)
    partial, lse = torch.zeros(2, 16, 8, 512), torch.zeros(2, 16, 8)

    sglang.triton_decode(NOPE, pool, out, PAGES, PAGES, (partial, lse), PAGES, 0.1)

    ((q, keys, values, *rest),) = seen
    assert q is NOPE and keys is pool and values.data_ptr() == pool.data_ptr()
    assert values.shape == (9, 1, 512)
    assert rest[0] is out and rest[3:5] == [partial, lse] and rest[6:] == [8, 0.1, 1.0, 1.0]


def test_sglangs_second_selection_writes_places_behind_an_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def transform(
        scores: torch.Tensor, lengths: torch.Tensor, *, out_offsets: torch.Tensor,
        out_indices: torch.Tensor,
    ) -> None:  # fmt: skip
        out_indices.copy_(scores.topk(out_indices.shape[1]).indices + out_offsets[:, None])

    module = SimpleNamespace(topk_transform_ragged_v2=transform)
    monkeypatch.setattr(sglang, "_module", {"sglang_topk_v2": module}.__getitem__)
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    lengths = torch.tensor([4, 4], dtype=torch.int32)

    out = sglang.topk_v2(scores, lengths, torch.tensor([0, 10], dtype=torch.int32), 2)

    assert out.dtype == torch.int32
    assert out.tolist() == [[1, 2], [13, 12]]


def test_a_release_without_the_second_selection_says_which_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang, "_module", {"sglang_topk_v2": SimpleNamespace()}.__getitem__)
    scores, none = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)

    with pytest.raises(LibraryMissing, match="no topk_v2"):
        sglang.topk_v2(scores, none, none, 2)


def test_the_fp8_kernel_gets_scales_of_one_and_the_first_of_its_outputs_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []

    def forward(**given: Any) -> tuple[torch.Tensor, ...]:
        seen.append(given)
        return (NOPE, ROPE, ROPE)

    module = SimpleNamespace(sparse_mla_q8kv8_prefill_fwd=forward)
    monkeypatch.setattr(sglang, "_module", {"sglang_q8": module}.__getitem__)
    q, latents, unit = (torch.ones(shape) for shape in ((3, 64, 576), (2057, 576), (1,)))
    out = sglang.q8_prefill(q, latents, PAGES, 0.1, unit)

    (given,) = seen
    assert out is NOPE
    assert given["kv"].shape == (2057, 1, 576)
    assert given["indices"].shape == (3, 1, 2048)
    assert given["q_scale"] is given["kv_scale"] is unit
    assert given["d_v"] == 512


@pytest.mark.parametrize("newest", [True, False])
def test_the_kernel_that_rounds_q_is_found_in_old_and_new_releases(
    monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    def cast(*given: Any) -> None:
        seen.append(given)

    seen: list[tuple[Any, ...]] = []
    new, old = sglang._CASTS
    where = new if newest else old
    found = {where: SimpleNamespace(concat_and_cast_q_fp8_pad=cast)}

    def import_module(name: str) -> Any:
        if name not in found:
            raise ModuleNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    sglang._cast.cache_clear()
    try:
        sglang.cast_q(NOPE, NOPE, ROPE)
        found.clear()
        sglang._cast.cache_clear()
        with pytest.raises(LibraryMissing, match="concat_and_cast_q_fp8_pad"):
            sglang.cast_q(NOPE, NOPE, ROPE)
    finally:
        sglang._cast.cache_clear()
    assert seen == [(NOPE, NOPE, ROPE, 16)]


def test_sglangs_top_k_takes_2048_and_its_operands_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = use_sgl_kernel(monkeypatch)
    scores, lengths = torch.zeros(1), torch.zeros(1)
    sglang_kernel.topk(scores, lengths)

    ((given, _),) = seen
    assert given == ("sgl_kernel.top_k.fast_topk_v2", scores, lengths, 2048, None)
