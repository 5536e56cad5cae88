"""V4's Hopper arms with FlashMLA's contract in torch at the library's edge: what they pass in is
what the kernels read, heads padded, pools as they lie in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.v4_prefill.case import V4PrefillCase
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

TINY = Setting(profile_of("tiny-v4"), 4, KVLayout.V4_PAGED, Device("CPU", "cpu"))
RANK, ROPE = 64, 32
BATCHES = [Batch.extend([0], [1]), Batch.extend([700, 3, 0], [40, 9, 130])]


def attention(
    q: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, scale: float, sink: torch.Tensor
) -> torch.Tensor:
    scores = torch.einsum("rhc,rkc->rhk", q.float(), keys.float()) * scale
    scores = scores.masked_fill(~counts[:, None], -torch.inf)
    both = torch.cat((scores, sink[None, :, None].expand(len(q), -1, 1)), dim=-1).softmax(-1)
    return torch.einsum("rhk,rkc->rhc", both[..., :-1], keys.float()).to(q.dtype)


def leading(indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (torch.arange(indices.shape[1]) < lengths[:, None]) & (indices >= 0)


def sparse_forward(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float,
    topk_length: torch.Tensor, sink: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    assert q.shape[1] in (64, 128) and q.is_contiguous()
    assert kv.shape[1] == 1 and kv.dtype is torch.bfloat16
    assert indices.shape[2] % 128 == 0 and indices.dtype is torch.int32
    chosen = indices[:, 0]
    counts = leading(chosen, topk_length) & (chosen < len(kv))
    keys = kv[:, 0][chosen.clamp(0, len(kv) - 1).long()]
    return attention(q, keys, counts, scale, sink)


def values(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Tokens of a pool given as the kernel gets it: read from its memory, page by page."""
    page_size, stride = pool.shape[1], pool.stride(0)
    flat = pool.as_strided((pool.shape[0] * stride,), (1,))
    slot = slots.clamp_min(0).long()
    page, offset = slot // page_size * stride, slot % page_size
    width = RANK + 2 * ROPE
    row = flat[(page + offset * width)[..., None] + torch.arange(width)]
    scale = flat[page + page_size * width + offset * 8].float()
    latent = row[..., :RANK].contiguous().view(torch.float8_e4m3fn).float()
    rope = row[..., RANK:].contiguous().view(torch.bfloat16).float()
    return torch.cat((latent * torch.exp2(scale - 127)[..., None], rope), dim=-1)


def sparse_decode(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float, schedule: object,
    *, topk_length: torch.Tensor, attn_sink: torch.Tensor, extra_k_cache: torch.Tensor,
    extra_indices_in_kvcache: torch.Tensor, extra_topk_length: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    assert schedule is not None
    assert q.shape[1] == 1 and q.shape[2] in (64, 128)
    parts, counts = [], []
    for tokens, chosen, length in (
        (pool, indices[:, 0], topk_length),
        (extra_k_cache, extra_indices_in_kvcache[:, 0], extra_topk_length),
    ):  # fmt: skip
        assert tokens.shape[2:] == (1, RANK + 2 * ROPE + 8)
        assert chosen.shape[1] % 64 == 0 and int(length.min()) >= 1
        parts.append(values(tokens, chosen))
        counts.append(leading(chosen, length))
    out = attention(q[:, 0], torch.cat(parts, 1), torch.cat(counts, 1), scale, attn_sink)
    return out[:, None]


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("arm", ["sparse_fwd", "with_kvcache"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("heads", [4, 2])
def test_a_kernel_arm_passes_what_its_kernel_reads(
    ratio: int, arm: str, batch: Batch, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_mla, "sparse_forward", sparse_forward)
    monkeypatch.setattr(flash_mla, "sparse_decode", sparse_decode)
    monkeypatch.setattr(flash_mla, "new_schedule", object)
    case = V4PrefillCase(ratio, batch, replace(TINY, heads=heads), torch.device("cpu"))
    output = POINTS[f"v4_prefill_c{ratio}"].arm(arm).build(case)()

    assert output.shape == (batch.q_tokens, heads, RANK + ROPE)
    assert case.error_of(output) < case.tolerance


def test_the_layers_of_a_pass_share_a_schedule_and_the_first_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def kernel(q: torch.Tensor, *operands: object, **more: object) -> torch.Tensor:
        del more
        given.append(operands[-1])
        return q

    monkeypatch.setattr(flash_mla, "sparse_decode", kernel)
    monkeypatch.setattr(flash_mla, "new_schedule", object)
    case = V4PrefillCase(4, BATCHES[1], TINY, torch.device("cpu"))
    arm = POINTS["v4_prefill_c4"].arm("with_kvcache")
    assert arm.first is not None
    later, first = arm.build(case), arm.first(case)
    for run in (later, later, first, first):
        run()

    assert given[0] is given[1]
    assert len({id(one) for one in given}) == 3
    assert POINTS["v4_prefill_c4"].arm("sparse_fwd").first is None
