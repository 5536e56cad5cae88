"""nsa-tune's copies beside SGLang's own on a GPU: ``pytest -m gpu``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang.eligible import PADDED_HEADS, Engine
from nsa_tune.engines.sglang.kernels import copies
from nsa_tune.engines.sglang.kernels.copies import PADDING, READ_BACK, padded, read_back

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
HEADS, TOPK, RANK, ROPE = 16, 2048, 512, 64


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000, 20001])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_prefix_is_read_back_bit_by_bit(
    tokens: int, kind: torch.dtype, device: torch.device
) -> None:
    pool = copies.made_up_pool(30000, device)
    slots = torch.randint(len(pool), (tokens,), device=device).to(kind)
    raw = pool.view(len(pool), -1).view(torch.uint8)
    wanted = packed_fp8.dequantize_reference(raw, slots, RANK, ROPE).unsqueeze(1)

    assert torch.equal(read_back(pool, slots).view(torch.int16), wanted.view(torch.int16))


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs sglang")
def test_sglangs_own_read_back_gives_the_same_bits_and_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = import_module("sglang.kernels.ops.attention.dsa.dequant_k_cache")
    name = "dequantize_k_cache_paged"
    function = getattr(module, name, None) or getattr(module, f"{name}_dsa")

    monkeypatch.setattr(copies, "_function", lambda backend: function)

    timings = list(READ_BACK.timings(copies.read_backs(Engine(None, None))))

    assert all(min(timing.engine_us, timing.swapped_us) > 0 for timing in timings)


@pytest.fixture
def attended() -> Callable[..., torch.Tensor]:
    """As `_forward_flashmla_sparse` of SGLang does it."""
    flash_mla: Any = pytest.importorskip("sgl_kernel.flash_mla")

    def forward(
        backend: Any, *, q_all: torch.Tensor, kv_cache: torch.Tensor, v_head_dim: int,
        page_table_1: torch.Tensor, sm_scale: float, topk_length: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        del backend
        heads = q_all.shape[1]
        q = q_all
        if heads < PADDED_HEADS:
            q = q_all.new_zeros(q_all.shape[0], PADDED_HEADS, q_all.shape[2])
            q[:, :heads] = q_all
        out: torch.Tensor = flash_mla.flash_mla_sparse_fwd(
            q=q, kv=kv_cache, indices=page_table_1[:, None], sm_scale=sm_scale, d_v=v_head_dim,
            topk_length=topk_length,
        )[0]  # fmt: skip
        return out[:, :heads]

    return forward


def test_what_is_behind_the_queries_reaches_no_output(
    attended: Callable[..., torch.Tensor],
) -> None:
    """With NaN in place of zeros."""

    class Backend:
        num_q_heads, dsa_index_topk = HEADS, TOPK
        _forward_flashmla_sparse = wrapped(attended, copies.around_sparse)

    calls = copies.paddings(Engine(None, Backend()))

    assert list(PADDING.timings(calls)), "it compares every bit"


def test_queries_are_kept(device: torch.device) -> None:
    q = torch.randn(300, HEADS, RANK + ROPE, device=device).bfloat16()

    assert torch.equal(padded(q, 64)[:, :HEADS], q)
