"""Dense absorbed attention by a made-up kernel, against attention over the selected keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.whole_pass.absorbed import AbsorbedAttention, Inputs
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Swap, around_extend, swapped

HEADS, RANK, ROPE = 3, 512, 64
HEAD_DIM = RANK + ROPE
LAYER = SimpleNamespace(
    layer_id=7, head_dim=HEAD_DIM, v_head_dim=RANK, tp_q_head_num=HEADS, scaling=0.07, logit_cap=0.0
)


class _Pool:
    """A bf16 pool's latents, in float: one row a slot."""

    def __init__(self, pages: int) -> None:
        self.rows = torch.randn(pages * PAGE, 1, HEAD_DIM)

    def set_mla_kv_buffer(self, layer: Any, slots: Any, latent: Any, rope: Any) -> None:
        self.rows[slots] = torch.cat([latent, rope], dim=-1)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        assert layer_id == LAYER.layer_id
        return self.rows


@dataclass
class _Kernel:
    """FlashAttention-3's call in plain PyTorch, and what it was last given."""

    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **given: Any) -> torch.Tensor:
        self.given = given
        out = torch.full_like(given["qv"], float("nan"))
        starts = given["cu_seqlens_q"].tolist()
        for i, kv_len in enumerate(given["cache_seqlens"].tolist()):
            rows = slice(starts[i], starts[i + 1])
            count = starts[i + 1] - starts[i]
            assert count <= given["max_seqlen_q"]
            pages = given["page_table"][i, : -(-kv_len // PAGE)].long()
            keys, values = (
                given[name][pages].flatten(0, 2)[:kv_len] for name in ("k_cache", "v_cache")
            )
            scores = given["q"][rows] @ keys.T + given["qv"][rows] @ values.T  # [rows, heads, keys]
            last = torch.arange(kv_len - count, kv_len)[:, None, None]
            hidden = torch.arange(kv_len) > last
            weights = (scores * given["softmax_scale"]).masked_fill(hidden, -torch.inf).softmax(-1)
            out[rows] = weights @ values
        return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    made = _Kernel()
    backend = ModuleType("made_up_backend")
    vars(backend)["flash_attn_with_kvcache"] = made
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    return made


def _backend(pages: int) -> Any:
    kind = type("DeepseekSparseAttnBackend", (), {"__module__": "made_up_backend"})
    backend = kind()
    backend.token_to_kv_pool = _Pool(pages)
    backend.num_splits = 0
    return backend


def _sgl(backend: Any, *arguments: Any, **named: Any) -> str:
    return "SGLang's own"


def _by_selected_keys(
    pool: _Pool, q: Any, q_rope: Any, pages: Sequence[Sequence[int]], lens: Any
) -> torch.Tensor:
    """What sparse attention computes where every key up to a token is selected, token by token."""
    found, row = [], 0
    for pages_of, (prefix, new) in zip(pages, lens, strict=True):
        slots = [page * PAGE + i for page in pages_of for i in range(PAGE)]
        for at in range(prefix, prefix + new):
            keys = pool.rows[slots[: at + 1], 0]
            query = torch.cat([q[row], q_rope[row]], dim=-1)
            found.append((query @ keys.T * LAYER.scaling).softmax(-1) @ keys[:, :RANK])
            row += 1
    return torch.stack(found)


def test_it_computes_what_attention_over_all_selected_keys_does(kernel: _Kernel) -> None:
    """Two sequences behind prefixes, and one that stands for padding."""
    torch.manual_seed(0)
    lens, pages = [(70, 5), (0, 130), (0, 3)], [[4, 2, 0], [1, 5, 3], [0, 0, 0]]
    tokens = sum(new for _, new in lens)
    q, q_rope = torch.randn(tokens, HEADS, RANK), torch.randn(tokens, HEADS, ROPE)
    k, k_rope = torch.randn(tokens, 1, RANK), torch.randn(tokens, 1, ROPE)
    slots = [
        pages_of[at // PAGE] * PAGE + at % PAGE
        for pages_of, (prefix, new) in zip(pages, lens, strict=True)
        for at in range(prefix, prefix + new)
    ]
    int32 = torch.int32
    inputs = Inputs(
        starts=torch.tensor([0, 5, 135, 138], dtype=int32),
        kv_lens=torch.tensor([75, 130, 3], dtype=int32),
        pages=torch.tensor(pages, dtype=int32),
    )
    backend = _backend(pages=6)
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots))
    with swapped(Swap(backend, AbsorbedAttention(backend, inputs, 130))):
        found = around_extend(
            _sgl, backend, q.flatten(1), k, None, LAYER, batch, q_rope=q_rope, k_rope=k_rope
        )

    assert torch.equal(backend.token_to_kv_pool.rows[slots], torch.cat([k, k_rope], dim=-1))
    expected = _by_selected_keys(backend.token_to_kv_pool, q, q_rope, pages, lens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    shapes = {name: tuple(one.shape) for name, one in kernel.given.items() if torch.is_tensor(one)}
    assert shapes == {
        "q": (tokens, HEADS, ROPE), "qv": (tokens, HEADS, RANK),
        "k_cache": (6, PAGE, 1, ROPE), "v_cache": (6, PAGE, 1, RANK),
        "page_table": (3, 3), "cache_seqlens": (3,), "cu_seqlens_q": (4,),
    }  # fmt: skip
    assert kernel.given["causal"] is True
    assert kernel.given["max_seqlen_q"] == 130
