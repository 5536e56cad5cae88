"""The adapters' calls, with made-up libraries at the edge: no GPU is needed to get them right."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla


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


def two_pools(sink: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(3, dtype=torch.int32)
    return flash_mla.sparse_decode_two_pools(
        Q[:, None], Q, INDICES, lengths, Q, INDICES, lengths, 0.1, sink
    )


def test_v32_and_v4_formats_take_the_legacy_kernels_where_there_is_a_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use(monkeypatch)
    flash_mla.sparse_forward(Q, Q, INDICES, 0.1, None)
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1)
    two_pools(torch.zeros(64))

    assert [call["use_legacy"] for call in calls] == [True, True, True]


def test_the_window_and_the_compressed_tokens_are_two_pools_of_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use(monkeypatch)
    sink = torch.zeros(64)
    two_pools(sink)

    (call,) = calls
    assert call["attn_sink"] is sink
    assert call["extra_k_cache"] is Q
    assert call["extra_indices_in_kvcache"] is INDICES
    assert call["topk_length"].tolist() == call["extra_topk_length"].tolist() == [1, 1, 1]
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
    flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1)

    assert all("use_legacy" not in call for call in calls)


def test_every_decode_call_gets_a_schedule_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch)
    for _ in range(2):
        flash_mla.sparse_decode(Q[:, None], Q, INDICES, 0.1)

    schedules = [call["tile_scheduler_metadata"] for call in calls]
    assert schedules[0] is not schedules[1]
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
