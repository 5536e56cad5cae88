"""What happens to a V4 backend that the engine has just built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.backend.hardware import detect
from nsa_tune.engines import opened
from nsa_tune.engines.decision_log import process_log as decision_log
from nsa_tune.engines.sglang import backend as module
from nsa_tune.engines.sglang.v4.backend import (
    around_v4_init,
    attach_v4,
    v4_facts_of,
)
from nsa_tune.engines.sglang.v4.prefill import around_sparse_prefill
from nsa_tune.engines.v4_answers import V4_SWITCH, Layers
from tests.engines.sglang.engine_v4 import V4Engine, pool, v4_model_runner
from tests.engines.sglang.tables import GPU, v4_table_file
from tests.engines.sglang.wheels import Wheel

HOOKS: dict[str, Callable[..., Any]] = {
    "__init__": around_v4_init,
    "_use_sparse_prefill": around_sparse_prefill,
}


@pytest.fixture
def engine(newest: Wheel, monkeypatch: pytest.MonkeyPatch) -> V4Engine:
    monkeypatch.setattr(module, "installed_version", lambda: newest.version)
    monkeypatch.setattr(detect, "local_device_name", lambda: GPU)
    monkeypatch.delenv("SGLANG_DSV4_Q8KV8_PREFILL", raising=False)
    monkeypatch.setenv(V4_SWITCH, "1")
    for cached in (opened._dispatcher, decision_log):
        cached.cache_clear()
    return V4Engine.of(newest, monkeypatch)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in which the paged kernel always wins."""
    monkeypatch.setenv("NSA_TUNE_DB", str(v4_table_file(tmp_path, paged_us=1.0)))


def _built(engine: V4Engine, runner: Any = None, **changes: Any) -> Any:
    """A backend of the engine's class, built under the hooks as the engine would build it."""

    def constructor(self: Any, model_runner: Any, skip_prefill: bool = False) -> None:
        assert not skip_prefill
        vars(self).update(vars(engine.backend(type(self), **changes)))

    engine.backend_class.__init__ = constructor  # type: ignore[misc]
    return engine.hooked(HOOKS)(runner or v4_model_runner(), skip_prefill=False)


def _steers(engine: V4Engine, backend: Any) -> bool:
    answers = engine.asked(backend, engine.batch([70_000], [64]))
    assert len(answers) == 1
    return answers == {False}


@pytest.mark.usefixtures("measured")
def test_a_measured_backend_is_steered_and_says_by_what(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert _steers(engine, _built(engine))
    assert _steers(engine, _built(engine))

    # Nothing of DSA's hooks, which a process that runs V4 does not need.
    (line,) = [r.message for r in caplog.records if r.name == "nsa_tune.sglang"]
    assert line.startswith("deepseek-v4, 128 local heads, fp8 KV: V4's sparse prefill switch by")
    assert "v4.tsv" in line


def test_without_a_table_the_engine_decides_and_one_line_says_so(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert not any(_steers(engine, _built(engine)) for _ in range(2))

    (line,) = [r.message for r in caplog.records]
    assert "answers, without measurements: nothing is tuned for deepseek-v4" in line


def test_a_table_of_another_gpu_is_left_alone(
    engine: V4Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "local_device_name", lambda: "NVIDIA H20")

    assert not _steers(engine, _built(engine))
    assert "that table is of another GPU" in caplog.text


def test_a_table_without_one_of_the_ratios_is_left_alone(
    engine: V4Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = v4_table_file(tmp_path, paged_us=1.0, points=(4,))
    monkeypatch.setenv("NSA_TUNE_DB", str(path))

    assert not _steers(engine, _built(engine))
    assert "the table has no times of v4_prefill_c128" in caplog.text
    assert _steers(engine, _built(engine, token_to_kv_pool=pool([4] * 60)))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_draft_runner": True}, "a draft worker"),
        ({"is_dsv41": True}, "DeepSeek V4.1"),
        ({"low_ratios": (1, 2)}, "DeepSeek V4.1"),
        ({"trtllm_attn": True}, "attention by trtllm-gen"),
        ({"mega_attn": True}, "mega attention"),
        ({"dsv4_prefill_backend": "flashmla_sparse_q8"}, "prefill by flashmla_sparse_q8"),
        ({"token_to_kv_pool": pool(layout="v41")}, "KV layouts other than v4"),
        ({"token_to_kv_pool": pool(compressed="v41_fp4")}, "KV layouts other than v4"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"enable_decoder_swa_bounded_replay": True}, "bounded replay of the window"),
        ({"token_to_kv_pool": pool([0] * 60)}, "ratios: none but that of the window"),
        ({"token_to_kv_pool": pool([4, 2] * 30)}, "ratios: 2, 4"),
        ({"index_topk": 2048}, "index_topk 2048"),
        ({"page_size": 64}, "page_size 64"),
    ],
)
def test_what_was_not_measured_is_left_alone(
    engine: V4Engine, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _built(engine, **changes)

    assert not [name for name in vars(backend) if name.startswith("_nsa_tune")]
    assert why in caplog.text
    assert "SGLang decides V4's prefill by itself" in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"attn_dcp_size": 2}, "context parallelism"),
        ({"prefill_graphs": "breakable"}, "prefill in CUDA graphs"),
    ],
)
def test_passes_that_are_prepared_elsewhere_are_left_alone(
    engine: V4Engine, state: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    vars(engine.state).update(state)

    assert not _steers(engine, _built(engine))
    assert why in caplog.text


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("value", "chosen", "steered"),
    [("1", "auto", False), ("0", "flashmla_sparse_q8", True), (None, "flashmla_sparse", True)],
)
def test_the_fp8_kernels_variable_counts_as_the_engine_reads_it(
    engine: V4Engine,
    value: str | None,
    chosen: str,
    steered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if value is not None:
        monkeypatch.setenv("SGLANG_DSV4_Q8KV8_PREFILL", value)

    assert _steers(engine, _built(engine, dsv4_prefill_backend=chosen)) == steered


@pytest.mark.usefixtures("measured")
def test_deterministic_inference_is_left_alone(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    runner = v4_model_runner(enable_deterministic_inference=True)

    assert not _steers(engine, _built(engine, runner))
    assert "deterministic inference" in caplog.text


def test_the_layers_are_those_of_this_process(engine: V4Engine) -> None:
    """Of a pipeline's stage; the last ratio in the model's list is the draft's."""
    backend = engine.backend(token_to_kv_pool=pool([0, 0, *[4, 128] * 20, 4]))
    engine.state.attn_tp_size = 2

    facts = v4_facts_of(backend, v4_model_runner((0, 43)))
    assert facts.layers == Layers({4: 21, 128: 20}, 2)
    assert (facts.profile.name, facts.heads, facts.most_q) == ("deepseek-v4", 64, 2048)
    stage = v4_facts_of(backend, v4_model_runner((2, 3), chunked_prefill_size=-1))
    assert stage.layers == Layers({4: 1}, 0)
    assert stage.most_q == 2048


def test_beyond_what_the_engine_ever_gives_the_paged_kernel_nothing_is_turned_off(
    engine: V4Engine,
) -> None:
    facts = v4_facts_of(engine.backend(), v4_model_runner(chunked_prefill_size=131072))

    assert facts.most_q == 11673


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("asked", ["", "0"])
def test_nothing_is_steered_unless_that_is_asked_for(
    engine: V4Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
) -> None:
    monkeypatch.setenv(V4_SWITCH, asked)

    assert not _steers(engine, _built(engine))
    assert "NSA_TUNE_V4=1 asks for it" in caplog.text


@pytest.mark.usefixtures("measured")
def test_other_local_heads_have_no_table_here(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.state.attn_tp_size = 8

    assert not _steers(engine, _built(engine))
    assert "nothing is tuned for deepseek-v4 with 16 local heads" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_hook_that_is_missing_is_said(engine: V4Engine, caplog: pytest.LogCaptureFixture) -> None:
    backend = engine.backend(engine.hooked({"_use_sparse_prefill": around_sparse_prefill}))
    attach_v4(backend, v4_model_runner())
    assert "__init__ is not hooked" in caplog.text
    assert "_use_sparse_prefill is not hooked" not in caplog.text

    attach_v4(engine.backend(), v4_model_runner())
    assert "_use_sparse_prefill is not hooked: SGLang decides that itself" in caplog.text
    assert "DeepseekSparseAttnBackend" not in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_subclass_that_asks_the_switch_is_steered_too(engine: V4Engine) -> None:
    kind = type("Derived", (engine.hooked(HOOKS),), {})
    backend = engine.backend(kind)
    attach_v4(backend, v4_model_runner())

    assert _steers(engine, backend)


@pytest.mark.usefixtures("measured")
def test_a_backend_of_another_shape_is_no_exception(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _built(engine, SimpleNamespace())

    assert not _steers(engine, backend)
    assert "looking at a V4 attention backend failed" in caplog.text


def test_the_constructors_own_exceptions_pass(engine: V4Engine) -> None:
    def constructor(self: Any, model_runner: Any) -> None:
        raise MemoryError("no room")

    engine.backend_class.__init__ = constructor  # type: ignore[misc]
    with pytest.raises(MemoryError):
        engine.hooked(HOOKS)(v4_model_runner())
