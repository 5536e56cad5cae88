"""nsa-tune's copies give what SGLang's give, take only what they know, and only where faster."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.eligible import PADDED_HEADS, Engine
from nsa_tune.engines.sglang.kernels import copies as module
from nsa_tune.engines.sglang.kernels.copies import (
    PADDING,
    READ_BACK,
    around_read_back,
    around_sparse,
    made_up_pool,
    padded,
    read_back,
)
from nsa_tune.engines.sglang.kernels.swap import Timing, Wins
from tests.engines.sglang.wheels import BACKEND, Wheel

CPU = torch.device("cpu")
RANK, ROPE, HEADS, TOPK = 512, 64, 16, 8
METHOD = "DeepseekSparseAttnBackend._forward_flashmla_sparse"


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield
    for swap in (PADDING, READ_BACK):
        swap.forget()
    switch.resume()


def from_size(size: int) -> Wins:
    """nsa-tune's copy is faster from `size` on."""
    return Wins([Timing((size,), 2.0, 1.0)], 0.02, beyond=True)


def pool_of(tokens: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    pool: torch.Tensor = made_up_pool(tokens, CPU)
    return pool


# --- reading a prefix back


def dequantized(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    raw = pool.view(-1, pool.shape[-1]).view(torch.uint8)
    return packed_fp8.dequantize_reference(raw, slots, RANK, ROPE).unsqueeze(1)


@given(slots=st.lists(st.integers(0, 29), min_size=1, max_size=20), wide=st.booleans())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_prefix_is_read_back_bit_by_bit(
    kernel_device: torch.device, slots: list[int], wide: bool
) -> None:
    pool = pool_of(30)
    # Powers of two, for Triton's interpreter cuts off where a GPU rounds.
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0]).view(torch.uint8)
    pool.view(torch.uint8)[..., RANK : RANK + len(scales)] = scales
    pool = pool.to(kernel_device)
    kind = torch.int64 if wide else torch.int32
    places = torch.tensor(slots, dtype=kind, device=kernel_device)

    found = read_back(pool, places)

    assert torch.equal(found.view(torch.int16), dequantized(pool, places).view(torch.int16))


@pytest.mark.parametrize(
    ("pool", "slots"),
    [
        (pool_of(8).view(torch.uint8), torch.zeros(2, dtype=torch.int32)),
        (pool_of(8)[:, :, :576], torch.zeros(2, dtype=torch.int32)),
        (pool_of(8)[::2], torch.zeros(2, dtype=torch.int32)),
        (pool_of(8), torch.zeros(2)),
        (pool_of(8), torch.zeros(2, 2, dtype=torch.int32)),
        (pool_of(8), torch.zeros(4, dtype=torch.int32)[::2]),
    ],
)
def test_other_pools_and_slots_are_left_to_sglang(pool: torch.Tensor, slots: torch.Tensor) -> None:
    READ_BACK.wins = from_size(1)

    assert wrapped(lambda pool, slots: "SGLang's", around_read_back)(pool, slots) == "SGLang's"


def test_a_prefix_is_read_back_from_the_measured_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_back", lambda pool, slots: "nsa-tune's")
    read = wrapped(lambda *_, **__: "SGLang's", around_read_back)
    pool, slots = pool_of(8), torch.zeros(4, dtype=torch.int32)

    assert read(pool, slots) == "SGLang's"
    READ_BACK.wins = from_size(4)
    assert read(pool, slots) == "nsa-tune's"
    assert read(pool, slots[:3]) == "SGLang's"
    assert read(pool, slots, 64) == "SGLang's"
    assert read(pool, slots, group_size=64) == "SGLang's"
    assert read(pool, page_table_1_flattened=slots) == "SGLang's"
    assert read(quant_k_cache=pool, page_table_1_flattened=slots) == "SGLang's"
    switch.pause()
    assert read(pool, slots) == "SGLang's"
    switch.resume()
    with monkeypatch.context() as patch:
        patch.setenv("NSA_TUNE_COPIES", "0")
        assert read(pool, slots) == "SGLang's"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert read(pool, slots) == "SGLang's"


# --- padding queries


def attended(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int,
    topk_length: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, None]:  # fmt: skip
    """flash_mla_sparse_fwd in torch: each head by itself."""
    assert q.shape[1] % PADDED_HEADS == 0, "what FlashMLA takes"
    picked = kv.float()[:, 0][indices[:, 0].long()]
    scores = torch.einsum("thd,tkd->thk", q.float(), picked) * sm_scale
    return torch.einsum("thk,tkd->thd", scores.softmax(-1), picked[..., :d_v]), None, None


@pytest.fixture
def engine(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend with SGLang's own method, hooked, and attention in torch."""
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        module = ModuleType(name)
        vars(module)["flash_mla_sparse_fwd"] = attended
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
        monkeypatch.setitem(sys.modules, name, module)
    method = wheel.compiled(BACKEND, METHOD, {"torch": torch})

    class Backend:
        device_sm_major, num_q_heads, dsa_index_topk = 9, HEADS, TOPK
        _forward_flashmla_sparse = wrapped(method, around_sparse)

    return Backend()


def passed(rows: int, heads: int = HEADS) -> dict[str, Any]:
    """What SGLang passes to `_forward_flashmla_sparse`."""
    torch.manual_seed(rows)
    return {
        "q_all": torch.randn(rows, heads, RANK + ROPE).bfloat16(),
        "kv_cache": torch.randn(40, 1, RANK + ROPE).bfloat16(),
        "v_head_dim": RANK,
        "page_table_1": torch.randint(40, (rows, TOPK), dtype=torch.int32),
        "sm_scale": 0.1,
        "topk_length": torch.full((rows,), TOPK, dtype=torch.int32),
    }


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_padded_queries_attend_as_sglangs(
    engine: Any, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    named = passed(5, heads)
    own = engine._forward_flashmla_sparse(**named)
    widened: list[torch.Tensor] = []

    def with_nan(q: torch.Tensor, heads: int) -> torch.Tensor:
        out: torch.Tensor = padded(q, heads)
        out[:, q.shape[1] :] = float("nan")
        widened.append(out)
        return out

    monkeypatch.setattr(module, "padded", with_nan)
    PADDING.wins = from_size(1)
    found = engine._forward_flashmla_sparse(**named)

    assert found.shape == own.shape == (5, heads, RANK)
    assert torch.equal(found, own)
    assert len(widened) == (heads < PADDED_HEADS)


def test_padding_keeps_the_queries() -> None:
    q = torch.randn(3, 16, 576).bfloat16()

    out = padded(q, 64)

    assert out.shape == (3, 64, 576)
    assert torch.equal(out[:, :16], q)


@pytest.mark.parametrize(
    "q",
    [
        torch.zeros(3, 16, 576),
        torch.zeros(3, 576, 16).bfloat16().transpose(1, 2),
        torch.zeros(3, 16, 574).bfloat16(),
    ],
)
def test_other_queries_are_left_to_sglang(q: torch.Tensor) -> None:
    assert padded(q, 64) is None


def test_queries_are_padded_from_the_measured_size_on(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(q: torch.Tensor, heads: int) -> torch.Tensor:
        calls.append(len(q))
        out: torch.Tensor = padded(q, heads)
        return out

    monkeypatch.setattr(module, "padded", counted)
    engine._forward_flashmla_sparse(**passed(9))
    PADDING.wins = from_size(4)
    engine._forward_flashmla_sparse(**passed(3))
    engine._forward_flashmla_sparse(**passed(4))
    switch.pause()
    engine._forward_flashmla_sparse(**passed(5))
    switch.resume()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    engine._forward_flashmla_sparse(**passed(6))

    assert calls == [4]


def test_a_copy_that_fails_is_left_to_sglang_for_good(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(q: torch.Tensor, heads: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "padded", fails)
    PADDING.wins = from_size(1)

    assert engine._forward_flashmla_sparse(**passed(5)).shape == (5, HEADS, RANK)
    assert PADDING.wins is None
    assert "out of memory" in caplog.text


# --- an engine's start


def reads(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """SGLang's function, in torch."""
    return dequantized(pool, slots)


@pytest.mark.parametrize("name", ["dequantize_k_cache_paged", "dequantize_k_cache_paged_dsa"])
def test_sglangs_own_function_is_found_behind_the_hook(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backends = ModuleType("a_backends_module")
    monkeypatch.setitem(sys.modules, backends.__name__, backends)
    backend = type("Backend", (), {"__module__": backends.__name__})()

    assert module._function(backend) is None
    vars(backends)[name] = reads
    assert module._function(backend) is None, "bound before the hook was in place"
    vars(backends)[name] = wrapped(reads, around_read_back)
    assert module._function(backend) is reads


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few tokens, on the CPU."""
    monkeypatch.setattr(module, "current_device", lambda: CPU)
    monkeypatch.setattr(module, "_TOKENS", (4, 8))
    monkeypatch.setattr(module, "_ROWS", (2, 4))
    monkeypatch.setattr(module, "_KEYS", 40)
    monkeypatch.setattr(module, "read_back", dequantized)
    monkeypatch.setattr(module, "_function", lambda backend: reads)


def test_the_calls_to_compare_give_the_same_bits_both_ways(engine: Any, small: None) -> None:
    made = Engine(None, engine)
    calls = [*module.read_backs(made), *module.paddings(made)]

    assert [call.size for call in calls] == [(4,), (8,), (2,), (4,)]
    for call in calls:
        compared = (call.compared or call.swapped)()
        assert torch.equal(call.engine(), compared)


def test_padding_that_reaches_other_heads_is_seen(
    engine: Any, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing(q: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None, None]:
        return attended(q, **named)[0] + q.sum(1, keepdim=True)[..., :RANK], None, None

    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        monkeypatch.setattr(sys.modules[name], "flash_mla_sparse_fwd", mixing)

    with pytest.raises(RuntimeError, match="pads queries, is nan away from SGLang's"):
        list(PADDING.timings(module.paddings(Engine(None, engine))))


# --- what this takes for granted of SGLang


def test_sglang_attends_sparsely_by_keywords(wheel: Wheel) -> None:
    calls = [
        node
        for node in ast.walk(wheel.tree(BACKEND))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "_forward_flashmla_sparse"
    ]

    assert calls
    assert all(not call.args for call in calls)
    assert all("q_all" in {word.arg for word in call.keywords} for call in calls)


def test_sglang_reads_a_prefix_back_by_one_function_with_two_arguments(wheel: Wheel) -> None:
    name = "dequantize_k_cache_paged" + ("_dsa" if wheel.number >= (0, 5, 23) else "")
    users = {
        file: [
            node
            for node in ast.walk(wheel.tree(file))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
        ]
        for file in wheel.names("sglang/srt/")
        if file.endswith((BACKEND, "/forward_mha.py"))
    }

    assert len(users) == 2
    assert all(users.values())
    for calls in users.values():
        assert all(len(call.args) == 2 and not call.keywords for call in calls)
    assert wheel.has("sglang/kernels/ops/attention/dsa/dequant_k_cache.py", name)


def test_heads_are_padded_to_64_on_hopper_unless_they_are_enough(wheel: Wheel) -> None:
    body = ast.unparse(wheel.definition(BACKEND, METHOD))

    assert "required_padding = 128 if self.device_sm_major >= 10 else 64" in body
    assert "need_padding = num_heads % required_padding != 0" in body
