"""SGLang's choices for dense MLA against the function bodies that they are written down from."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune import Batch
from nsa_tune.backend.baselines import SGLANG_0_5_17, SGLANG_0_5_23, SGLANG_0_5_23_FULL, Baseline
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from tests.engines.sglang.wheels import Wheel

_METHODS = "sglang/srt/models/deepseek_common/attention_backend_handler.py"
_H200 = Setting(profile_of("deepseek-v3"), 16, KVLayout.BF16, KNOWN["NVIDIA H200"])


class _Method(Enum):
    MLA = auto()
    MHA_ONE_SHOT = auto()
    MHA_CHUNKED_KV = auto()


@pytest.fixture(params=["oldest", "newest"])
def dense_wheel(request: pytest.FixtureRequest) -> Any:
    """The releases whose choices are written down."""
    return request.getfixturevalue(request.param)


def _handler(wheel: Wheel, *, in_graph: bool, cached: int = 1) -> Callable[..., tuple[str, str]]:
    """The path and the kernel that the engine's own function takes with FlashAttention-3."""
    names = {
        "AttnForwardMethod": _Method,
        "MHA_ONE_SHOT_SUPPORTED_BACKENDS": ["fa3"],
        "_dispatch_mla_subtype": lambda attn, batch: _Method.MLA,
        "is_in_tc_piecewise_cuda_graph": lambda: False,
        "is_in_breakable_cuda_graph": lambda: in_graph,
        "is_cp_active": lambda batch: False,
        "mla_use_prefill_cp": lambda batch: False,
    }
    for helper in ("_get_sum_extend_prefix_lens", "_support_mha_one_shot"):
        names[helper] = wheel.compiled(_METHODS, helper, names)
    choose = wheel.compiled(_METHODS, "_handle_attention_backend", names)
    variables = wheel.text("sglang/srt/environ.py")
    assert "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD = EnvInt(8192)" in variables
    attn = SimpleNamespace(chunked_prefix_cache_threshold=8192, disable_chunked_prefix_cache=False)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)

    def taken(batch: Batch) -> tuple[str, str]:
        lens = batch.lens or ()
        given = SimpleNamespace(
            forward_mode=mode,
            extend_prefix_lens_cpu=[prefix for prefix, _ in lens],
            seq_lens_cpu=[prefix * cached + new for prefix, new in lens],
            get_max_chunk_capacity=lambda: _H200.max_chunk_kv,
        )
        method = choose(attn, given, "fa3")
        kernel = "sgl_fa3_merged" if method is _Method.MHA_CHUNKED_KV else "sgl_fa3"
        return "mla" if method is _Method.MLA else "mha", kernel

    return taken


def _batches(most_new: int) -> list[Batch]:
    random = Random(5)
    counts = [random.randint(1, 6) for _ in range(500)]
    return [
        Batch.extend(
            [random.choice((0, random.randrange(3000), random.randrange(60000))) for _ in range(n)],
            [random.randint(1, most_new // n) for _ in range(n)],
        )
        for n in counts
    ]


def _written(baseline: Baseline, name: str, batch: Batch) -> str:
    question = next(q for q in POINTS["dense_prefill"].questions if q.name == name)
    return baseline.choose(question, batch, _H200)


def test_without_a_graph_the_sum_of_the_prefixes_decides(dense_wheel: Wheel) -> None:
    handler, seen = _handler(dense_wheel, in_graph=False), set()
    for batch in _batches(20_000):
        path, kernel = handler(batch)
        seen.add((path, kernel))

        assert _written(SGLANG_0_5_17, "prefill_path", batch) == path, batch
        if path == "mha":
            assert _written(SGLANG_0_5_17, "mha_kernel", batch) == kernel, batch
        if batch.q_tokens > 8192:
            assert _written(SGLANG_0_5_23, "prefill_path", batch) == path, batch
            assert _written(SGLANG_0_5_23_FULL, "prefill_path", batch) == path, batch
    assert seen == {("mla", "sgl_fa3"), ("mha", "sgl_fa3"), ("mha", "sgl_fa3_merged")}


def test_in_a_breakable_graph_it_is_always_absorbed(dense_wheel: Wheel) -> None:
    handler = _handler(dense_wheel, in_graph=True)
    for batch in _batches(8192):
        assert handler(batch)[0] == _written(SGLANG_0_5_23, "prefill_path", batch) == "mla"
        assert _written(SGLANG_0_5_23_FULL, "prefill_path", batch) == "mha"


def test_full_graphs_are_captured_as_if_nothing_were_cached(newest: Wheel) -> None:
    text = newest.text("sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py")
    assert "_capture_chunked_prefix" in text
    assert 'seq_lens_cpu=torch.tensor(capture_seq_lens, device="cpu")' in text
    handler = _handler(newest, in_graph=False, cached=0)
    for chunks in (1, 2, 4, 8, 16):  # one call over the new keys, in place of one a chunk
        assert handler(Batch.extend([512 * chunks] * 16, [64] * 16)) == ("mha", "sgl_fa3")


def test_which_release_captures_dense_mla(dense_wheel: Wheel) -> None:
    if dense_wheel.version == "0.5.17":
        assert "MLA attention (non-DSA)" in dense_wheel.text("sglang/srt/server_args.py")
    else:
        sizes = dense_wheel.text("sglang/srt/arg_groups/memory_hook.py")
        assert "max_bs = min(8192, cfg.chunked_prefill_size)" in sizes
