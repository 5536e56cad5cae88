"""What happens to a backend that the engine has just built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune._errors import LibraryMissing
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.engines import dispatchers
from nsa_tune.engines.decision_log import process_log as decision_log
from nsa_tune.engines.sglang import backend as module
from nsa_tune.engines.sglang.backend import around_init, attach
from nsa_tune.engines.sglang.facts import facts_of
from nsa_tune.engines.sglang.indexer import around_context_lens
from nsa_tune.engines.sglang.kernels.copies import around_sparse
from nsa_tune.engines.sglang.kernels.decode import around_fa3
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import around_extend
from nsa_tune.engines.sglang.prefill import around_prefill, detach
from nsa_tune.engines.sglang.releases import release_of
from tests.engines.sglang.engine import Engine, model_runner
from tests.engines.sglang.tables import GPU, table_file
from tests.engines.sglang.wheels import Wheel

HOOKS: dict[str, Callable[..., Any]] = {
    "__init__": around_init,
    "set_dsa_prefill_impl": around_prefill,
    "_build_paged_mqa_schedule_2d_ctx_lens": around_context_lens,
    "forward_extend": around_extend,
    "_forward_fa3": around_fa3,
    "_forward_flashmla_sparse": around_sparse,
}


@pytest.fixture
def engine(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(module, "installed_release", lambda: release_of(wheel.version))
    monkeypatch.setattr(detect, "local_device_name", lambda: GPU)
    for cached in (dispatchers._dispatcher, decision_log):
        cached.cache_clear()
    return Engine.of(wheel, monkeypatch)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in which sparse prefill always wins."""
    monkeypatch.setenv("NSA_TUNE_DB", str(table_file(tmp_path, sparse_us=1.0, mha_us=1e6)))


def _built(engine: Engine, runner: Any = None, **changes: Any) -> Any:
    """A backend of the engine's class, built under the hooks as the engine would build it."""

    def constructor(self: Any, model_runner: Any, skip_prefill: bool = False) -> None:
        assert not skip_prefill
        vars(self).update(vars(engine.backend(type(self), **changes)), seen=model_runner)

    engine.backend_class.__init__ = constructor  # type: ignore[misc]
    runner = runner or model_runner()
    backend = engine.hooked(HOOKS)(runner, skip_prefill=False)
    assert backend.seen is runner
    return backend


def _steers(engine: Engine, backend: Any) -> bool:
    batch = engine.batch([4000], [64])
    return bool(engine.decided(backend, batch)[:2] == (False, "flashmla_sparse"))


@pytest.mark.usefixtures("measured")
def test_a_measured_backend_is_steered_and_says_by_what(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert _steers(engine, _built(engine))
    assert _steers(engine, _built(engine))

    (line,) = [r.message for r in caplog.records if r.name == "nsa_tune.sglang"]
    assert line.startswith("deepseek-v3.2, 128 local heads, fp8 KV: prefill by MHA or MLA")
    assert "table.tsv" in line


def test_without_a_table_the_engine_decides_and_one_line_says_so(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        backend = _built(engine)
        assert engine.decided(backend, engine.batch([0], [64]))[:2] == (True, "flashmla_kv")

    (line,) = [r.message for r in caplog.records]
    assert "chooses by itself: nothing is tuned for deepseek-v3.2" in line


def test_a_table_of_another_gpu_is_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package has tables of the H100, which is of the H20's architecture."""
    monkeypatch.setattr(detect, "local_device_name", lambda: "NVIDIA H20")
    backend = _built(engine)

    assert engine.decided(backend, engine.batch([1900], [64]))[:2] == (True, "flashmla_kv")
    assert "measured on NVIDIA H100 80GB HBM3, another GPU of sm90" in caplog.text
    assert caplog.records[-1].message == "SGLang decides by itself: that table is of another GPU"


@pytest.mark.usefixtures("measured")
def test_a_table_of_other_versions_steers_and_says_so(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: [GPU])
    assert _steers(engine, _built(engine))

    assert "stale: " in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_splits": 1}, "deterministic inference"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"dsa_index_kpool": 4}, "pooled indexer keys"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"_kv_shard_pool": object()}, "a sharded KV pool"),
        ({"qk_nope_head_dim": 64}, "no model profile"),
        ({"kv_cache_dim": 528}, "rows of 528"),
        ({"dsa_kv_cache_store_fp8": False, "kv_cache_dim": 576}, "torch.float8_e4m3fn"),
    ],
)
def test_what_was_not_measured_is_left_alone(
    engine: Engine, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _built(engine, **changes)

    assert not _steers(engine, backend)
    assert why in caplog.text
    assert "SGLang decides by itself" in caplog.text


@pytest.mark.usefixtures("measured")
def test_context_parallelism_and_sinks_are_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = model_runner()
    runner.model_config.hf_config.learnable_sink = True
    assert not _steers(engine, _built(engine, runner))
    assert "attention sinks" in caplog.text
    engine.state.attn_cp_size = 2
    assert not _steers(engine, _built(engine))
    assert "with context parallelism" in caplog.text


@pytest.mark.usefixtures("measured")
def test_stages_of_a_pipeline_are_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """One of other length would be charged otherwise, and takes the top-k of the one before."""
    runner = model_runner()
    runner.server_args.pp_size = 2

    assert not _steers(engine, _built(engine, runner))
    assert "with pipeline parallelism" in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("name", "value"), [("v_head_dim", 256), ("index_head_dim", 64)])
def test_a_model_of_another_shape_is_left_alone(
    engine: Engine, name: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = model_runner()
    setattr(runner.model_config, name, value)

    assert not _steers(engine, _built(engine, runner))
    assert f"{name} {value}" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_model_with_other_index_heads_is_left_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = model_runner()
    runner.model_config.hf_text_config.index_n_heads = 32

    assert not _steers(engine, _built(engine, runner))
    assert "index_n_heads 32" in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("value", "steered"), [("1", False), ("true", False), ("0", True)])
def test_top_k_of_one_rank_must_fit_all_ranks(
    engine: Engine, value: str, steered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that decide by themselves may differ, in the form of the indices too."""
    monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", value)

    assert _steers(engine, _built(engine)) == steered


@pytest.mark.usefixtures("measured")
def test_a_fault_leaves_nothing_attached(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    runner = model_runner()
    del runner.server_args.dsa_paged_mqa_logits_backend
    backend = _built(engine, runner, speculative_num_draft_tokens=2)

    assert not _steers(engine, backend)
    assert not [name for name in vars(backend) if name.startswith("_nsa_tune")]
    assert "so SGLang decides by itself: AttributeError" in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("draft", "shared"), [(True, True), (True, False), (False, True)])
def test_top_k_that_a_draft_worker_shares_stays_pool_slots(
    engine: Engine, draft: bool, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a conversion, the draft's decode would take flashmla_sparse's offsets for slots."""
    runner = model_runner()
    runner.is_draft_worker = draft
    runner.model_config.hf_config.index_share_for_mtp_iteration = shared

    assert _steers(engine, _built(engine, runner)) == (not (draft and shared))
    assert ("top-k shared over MTP steps" in caplog.text) == (draft and shared)
    caplog.clear()
    engine.backend_class.prepare_mtp_seed_indices = None  # type: ignore[attr-defined]
    assert _steers(engine, _built(engine, runner))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("layers", "steered"), [(61, True), (1, False), (None, False)])
def test_a_kernel_must_gain_in_all_layers_what_it_costs_once(
    engine: Engine, layers: int | None, steered: bool
) -> None:
    runner = model_runner()
    runner.layer_info.num_effective_layers = layers

    assert _steers(engine, _built(engine, runner)) == steered


@pytest.mark.usefixtures("measured")
def test_a_kernel_that_was_not_compared_stays(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The user chose it, and the table cannot say what leaving it would cost."""
    caplog.set_level(logging.INFO)
    backend = _built(engine, dsa_prefill_impl="flashmla_sparse_q8")

    engine.decided(backend, engine.batch([4000], [64]))
    assert backend.dsa_prefill_impl == "flashmla_sparse_q8"
    (line,) = [record.message for record in caplog.records if record.name == "nsa_tune.sglang"]
    assert line.endswith("how to prefill: flashmla_sparse_q8 is not among what was measured")


@pytest.mark.usefixtures("measured")
def test_auto_is_steered_where_all_that_it_chooses_from_was_measured(engine: Engine) -> None:
    assert _steers(engine, _built(engine, dsa_prefill_impl="flashmla_auto"))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("next_n", "backend_name", "paired"),
    [(2, "auto", True), (2, "deepgemm", True), (2, "cutedsl", False), (4, "auto", False),
     (None, "auto", False)],
)  # fmt: skip
def test_pairs_are_for_two_draft_tokens_and_deep_gemm(
    engine: Engine, next_n: int | None, backend_name: str, paired: bool
) -> None:
    runner = model_runner(dsa_paged_mqa_logits_backend=backend_name)
    backend = _built(engine, runner, speculative_num_draft_tokens=next_n)

    assert hasattr(backend, "_nsa_tune_indexer") == paired


@pytest.mark.usefixtures("measured")
def test_the_torch_fallback_of_the_indexer_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    backend = _built(engine, speculative_num_draft_tokens=2)

    assert not hasattr(backend, "_nsa_tune_indexer")


@pytest.mark.usefixtures("measured")
def test_a_hook_that_is_missing_is_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    backend = engine.backend(engine.hooked({"__init__": HOOKS["__init__"]}))
    attach(backend, model_runner())

    for name in ("set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens"):
        assert f"{name} is not hooked: SGLang decides that itself" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_backend_of_another_shape_is_no_exception(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _built(engine, SimpleNamespace())

    assert engine.decided(backend, engine.batch([0], [64]))[:2] == (True, "flashmla_kv")
    assert "looking at an attention backend failed" in caplog.text


def test_the_constructors_own_exceptions_pass(engine: Engine) -> None:
    def constructor(self: Any, model_runner: Any) -> None:
        raise MemoryError("no room")

    engine.backend_class.__init__ = constructor  # type: ignore[misc]
    with pytest.raises(MemoryError):
        engine.hooked(HOOKS)(model_runner())


@pytest.mark.usefixtures("measured")
def test_bf16_pools_have_tables_of_their_own(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(_built(engine, fp8=False), "_nsa_tune_prefill")  # the table is for fp8
    monkeypatch.setenv("NSA_TUNE_DB", str(table_file(tmp_path, "bf16")))
    dispatchers._dispatcher.cache_clear()
    backend = _built(engine, fp8=False)

    assert backend.token_to_kv_pool.dtype is torch.bfloat16
    assert hasattr(backend, "_nsa_tune_prefill")


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("draft", [False, True])
def test_in_a_release_that_is_not_known_only_what_a_start_proves_is_steered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, draft: bool
) -> None:
    known = release_of("0.5.23")
    assert known is not None
    monkeypatch.setattr(module, "installed_release", lambda: replace(known, known=False))
    runner = model_runner()
    runner.is_draft_worker = draft
    backend = _built(engine, runner, speculative_num_draft_tokens=2)

    assert _steers(engine, backend) == (not draft)
    assert "_nsa_tune_indexer" not in vars(backend)
    detach(backend)
    assert not _steers(engine, backend)


@pytest.mark.parametrize(("error", "base"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.03), (None, 0.0)])
def test_a_kernel_that_is_missing_or_wrong_is_left_out_with_one_line(
    engine: Engine,
    error: float | None,
    base: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(q: Any, latents: Any, indices: Any, scale: float, rank: int, *rest: Any) -> Any:
        lengths, union = rest
        assert torch.equal(lengths, (indices >= 0).sum(dim=1)) and lengths.dtype is torch.int32
        if error is None:
            raise LibraryMissing("this sglang has no such kernel")
        right = sparse_mla_reference(q, latents, indices, scale, rank)
        return (1 + base + error * union / 4) * right

    monkeypatch.setattr(module, "triton_sparse", kernel)
    monkeypatch.setattr(module, "current_device", lambda: torch.device("cpu"))
    facts = facts_of(engine.backend(num_q_heads=8), model_runner())
    impls = frozenset({"fa3", "triton_sparse_mla", "triton_sparse_mla_union4"})
    right = error == base == 0

    for _ in range(2):
        assert module._working(impls, facts) == (impls if right else {"fa3"})
    assert len(caplog.messages) == (not right)
    assert all("compiling triton_sparse_mla failed" in line for line in caplog.messages)
