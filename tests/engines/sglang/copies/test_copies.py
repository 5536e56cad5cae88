"""nsa-tune's copies give what SGLang's give, take only what they know, and only where faster."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.engines.hooking import wrapped
from nsa_tune.engines.sglang import last_start, switch
from nsa_tune.engines.sglang.copies import calibration, eligible, hooks
from nsa_tune.engines.sglang.copies.calibration import CopyTime, least_of
from nsa_tune.engines.sglang.copies.copies import padded, read_back
from nsa_tune.engines.sglang.copies.hooks import TAKEN
from tests.engines.sglang.wheels import BACKEND, Wheel

CPU = torch.device("cpu")
RANK, ROPE, HEADS, TOPK = 512, 64, 16, 8
METHOD = "DeepseekSparseAttnBackend._forward_flashmla_sparse"


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield
    TAKEN.forget()
    switch.resume()


def pool_of(tokens: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    pool: torch.Tensor = calibration._made_up_pool(tokens, CPU)
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
    TAKEN.read_back_tokens = 1

    assert (
        wrapped(lambda pool, slots: "SGLang's", hooks.around_read_back)(pool, slots) == "SGLang's"
    )


def test_a_prefix_is_read_back_from_the_measured_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "read_back", lambda pool, slots: "nsa-tune's")
    read = wrapped(lambda *_, **__: "SGLang's", hooks.around_read_back)
    pool, slots = pool_of(8), torch.zeros(4, dtype=torch.int32)

    assert read(pool, slots) == "SGLang's"
    TAKEN.read_back_tokens = 4
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
    assert q.shape[1] % eligible.PADDED_HEADS == 0, "what FlashMLA takes"
    picked = kv.float()[:, 0][indices[:, 0].long()]
    scores = torch.einsum("thd,tkd->thk", q.float(), picked) * sm_scale
    return torch.einsum("thk,tkd->thd", scores.softmax(-1), picked[..., :d_v]), None, None


@pytest.fixture
def engine(steered: Wheel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend with SGLang's own method, hooked, and attention in torch."""
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        module = ModuleType(name)
        vars(module)["flash_mla_sparse_fwd"] = attended
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
        monkeypatch.setitem(sys.modules, name, module)
    method = steered.compiled(BACKEND, METHOD, {"torch": torch})

    class Backend:
        device_sm_major, num_q_heads, dsa_index_topk = 9, HEADS, TOPK
        _forward_flashmla_sparse = wrapped(method, hooks.around_sparse)

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

    monkeypatch.setattr(hooks, "padded", with_nan)
    TAKEN.padding_rows = 1
    found = engine._forward_flashmla_sparse(**named)

    assert found.shape == own.shape == (5, heads, RANK)
    assert torch.equal(found, own)
    assert len(widened) == (heads < eligible.PADDED_HEADS)


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

    monkeypatch.setattr(hooks, "padded", counted)
    engine._forward_flashmla_sparse(**passed(9))
    TAKEN.padding_rows = 4
    engine._forward_flashmla_sparse(**passed(3))
    engine._forward_flashmla_sparse(**passed(4))
    switch.pause()
    engine._forward_flashmla_sparse(**passed(5))
    switch.resume()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    engine._forward_flashmla_sparse(**passed(6))

    assert calls == [4]


def test_a_copy_that_fails_leaves_all_to_sglang_for_good(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(q: torch.Tensor, heads: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(hooks, "padded", fails)
    TAKEN.padding_rows = TAKEN.read_back_tokens = 1

    assert engine._forward_flashmla_sparse(**passed(5)).shape == (5, HEADS, RANK)
    assert hooks.Taken() == TAKEN
    assert "out of memory" in caplog.text


# --- an engine's start


def runner_of(engine: Any, **changes: Any) -> Any:
    attributes = {
        "dsa_prefill_impl": "flashmla_sparse", "dsa_kv_cache_store_fp8": True, "num_splits": 0,
        "hisparse_coordinator": None,
    }  # fmt: skip
    for name, value in (attributes | changes).items():
        setattr(engine, name, value)
    return SimpleNamespace(is_draft_worker=False, attn_backend=engine)


def reads(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """SGLang's function, in torch."""
    return dequantized(pool, slots)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up Hopper GPU on which nsa-tune's copies take half the time."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(calibration, "timed_us", lambda ways: (20.0, 10.0))
    monkeypatch.setattr(calibration, "more_launched_us", lambda engine, own: 1.0)
    monkeypatch.setattr(calibration, "_TOKENS", (4, 8))
    monkeypatch.setattr(calibration, "_ROWS", (2, 4))
    monkeypatch.setattr(calibration, "_KEYS", 40)
    monkeypatch.setattr(calibration, "read_back", dequantized)
    monkeypatch.setattr(hooks, "_function", lambda backend: reads)


@pytest.mark.parametrize("name", ["dequantize_k_cache_paged", "dequantize_k_cache_paged_dsa"])
def test_sglangs_own_function_is_found_behind_the_hook(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = ModuleType("a_backends_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = type("Backend", (), {"__module__": module.__name__})()

    assert hooks._function(backend) is None
    vars(module)[name] = reads
    assert hooks._function(backend) is None, "bound before the hook was in place"
    vars(module)[name] = wrapped(reads, hooks.around_read_back)
    assert hooks._function(backend) is reads


def test_a_start_measures_both_copies_and_takes_what_is_faster(
    engine: Any, hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    hooks.attach(runner_of(engine))

    assert hooks.Taken(read_back_tokens=4, padding_rows=2) == TAKEN
    assert "prefixes are read back by nsa-tune from 4 tokens on (20 to 10 us at 4" in caplog.text
    assert "queries are padded by nsa-tune from 2 rows on" in (last_start.kept("copies") or "")


def test_a_copy_that_takes_the_host_longer_than_it_saves_is_not_taken(
    engine: Any, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "more_launched_us", lambda engine, own: 10.0)

    hooks.attach(runner_of(engine))

    assert hooks.Taken() == TAKEN


def test_what_differs_by_a_bit_is_never_taken(
    engine: Any, hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "read_back", lambda pool, slots: -dequantized(pool, slots))

    hooks.attach(runner_of(engine))

    assert hooks.Taken(read_back_tokens=None, padding_rows=2) == TAKEN
    assert "nsa-tune reads a prefix back otherwise than SGLang" in caplog.text


def test_padding_that_reaches_other_heads_is_never_taken(
    engine: Any, hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mixing(q: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None, None]:
        return attended(q, **named)[0] + q.sum(1, keepdim=True)[..., :RANK], None, None

    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        monkeypatch.setattr(sys.modules[name], "flash_mla_sparse_fwd", mixing)

    hooks.attach(runner_of(engine))

    assert TAKEN.padding_rows is None
    assert "nsa-tune pads queries otherwise than SGLang" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_splits": 1}, "inference is deterministic"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"dsa_kv_cache_store_fp8": False, "num_q_heads": 64}, "nothing to copy"),
        ({"_kv_shard_pool": object()}, "sharded"),
    ],
)
def test_other_engines_copy_by_themselves(
    engine: Any,
    hopper: None,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)

    hooks.attach(runner_of(engine, **changes))

    assert hooks.Taken() == TAKEN
    assert reason in caplog.text


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_the_environment_switches_it_off(
    engine: Any, hopper: None, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("NSA_TUNE_COPIES", value)

    hooks.attach(runner_of(engine))

    assert hooks.Taken() == TAKEN


def test_a_draft_model_changes_nothing(engine: Any, hopper: None) -> None:
    TAKEN.padding_rows = 7

    hooks.attach(SimpleNamespace(is_draft_worker=True))

    assert TAKEN.padding_rows == 7


def test_a_copy_is_taken_where_it_was_faster_at_all_larger_sizes() -> None:
    times = [CopyTime(1, 9, 5), CopyTime(2, 9, 9), CopyTime(4, 9, 5), CopyTime(8, 9, 5)]

    assert least_of(times) == 4
    assert least_of([*times, CopyTime(16, 9, 9)]) is None
    assert least_of([]) is None


# --- what this takes for granted of SGLang


def test_sglang_attends_sparsely_by_keywords(steered: Wheel) -> None:
    calls = [
        node
        for node in ast.walk(steered.tree(BACKEND))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "_forward_flashmla_sparse"
    ]

    assert calls
    assert all(not call.args for call in calls)
    assert all("q_all" in {word.arg for word in call.keywords} for call in calls)


def test_sglang_reads_a_prefix_back_by_one_function_with_two_arguments(steered: Wheel) -> None:
    name = "dequantize_k_cache_paged" + ("_dsa" if steered.version == "0.5.23" else "")
    users = {
        file: [
            node
            for node in ast.walk(steered.tree(file))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
        ]
        for file in steered.names("sglang/srt/")
        if file.endswith((BACKEND, "/forward_mha.py"))
    }

    assert len(users) == 2
    assert all(users.values())
    for calls in users.values():
        assert all(len(call.args) == 2 and not call.keywords for call in calls)
    assert steered.has("sglang/kernels/ops/attention/dsa/dequant_k_cache.py", name)


def test_heads_are_padded_to_64_on_hopper_unless_they_are_enough(steered: Wheel) -> None:
    body = ast.unparse(steered.definition(BACKEND, METHOD))

    assert "required_padding = 128 if self.device_sm_major >= 10 else 64" in body
    assert "need_padding = num_heads % required_padding != 0" in body
