"""V4's builders split a step at two places: both follow one answer, or neither is changed."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from nsa_tune import Batch
from nsa_tune.backend.hardware import detect
from nsa_tune.engines import opened
from nsa_tune.engines.decision_log import process_log, read_decisions
from nsa_tune.engines.v4_answers import V4_SWITCH
from nsa_tune.engines.vllm import facts as facts_module
from nsa_tune.engines.vllm import v4_backend
from nsa_tune.engines.vllm.prefill import ATTRIBUTE
from nsa_tune.engines.vllm.v4_backend import around_v4_init, attach_v4
from tests.engines.sglang.tables import GPU, v4_table_file
from tests.engines.vllm.engine import (
    Engine,
    Lens,
    builder_of,
    config,
    random_lens,
    stand_in_modules,
    step_of,
)
from tests.engines.wheels import Wheel

STEPS = 2000


class _Builders(NamedTuple):
    window: Any
    ratio: Any

    def built(self, lens: Lens, **changes: Any) -> tuple[Any, Any]:
        """How each splits the step."""
        step = step_of(lens, **changes)
        return self.window.build(0, step), self.ratio.build(0, step)


@pytest.fixture
def engine(wheel: Wheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    monkeypatch.setattr(detect, "local_device_name", lambda: GPU)
    monkeypatch.setattr(v4_backend, "_steered", [])
    monkeypatch.setenv("NSA_TUNE_DB", str(v4_table_file(tmp_path)))
    monkeypatch.setenv(V4_SWITCH, "1")
    for name, module in stand_in_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for cached in (opened._dispatcher, process_log):
        cached.cache_clear()
    return Engine(wheel)


def _config(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "num_attention_heads": 128, "head_dim": 512, "qk_rope_head_dim": 64, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 1024, "sliding_window": 128, "num_hidden_layers": 61,
        "compress_ratios": [0, 0, *([4, 128] * 29), 4, 0], **changes.pop("shape", {}),
    }  # fmt: skip
    hf_config = SimpleNamespace(**shape)
    return config(heads=128, text=hf_config, hf_config=hf_config, **changes)


def _builders(engine: Engine, given: Any, *, hooked: bool = True) -> _Builders:
    window = builder_of(engine.window(hooked=hooked), given, decode_threshold=1)
    ratio = builder_of(
        engine.v4(hooked=hooked), given, reorder_batch_threshold=1, compress_ratio=128
    )
    return _Builders(window, ratio)


def _steered(engine: Engine, **changes: Any) -> _Builders:
    builders = _builders(engine, _config(**changes))
    for builder in builders:
        attach_v4(builder)
    return builders


def _steps(seed: int) -> list[Lens]:
    random = Random(seed)
    return [random_lens(random) for _ in range(STEPS)]


def test_without_a_table_every_step_is_the_engines_own(engine: Engine) -> None:
    given = _config()
    plain, hooked = (_builders(engine, given, hooked=one) for one in (False, True))
    for lens in _steps(1):
        assert hooked.built(lens) == plain.built(lens)


def test_both_builders_follow_one_answer(engine: Engine) -> None:
    plain, steered = _builders(engine, _config(), hooked=False), _steered(engine)
    prefill = steered.window.__dict__[ATTRIBUTE]
    changed = 0
    for lens in _steps(2):
        own, ours = plain.built(lens), steered.built(lens)
        assert own[0] == own[1]
        assert ours[0] == ours[1], lens
        extends = lens[next((i for i, (_, new) in enumerate(lens) if new > 1), len(lens)) :]
        tokens = sum(new for _, new in lens)
        paged = (
            bool(extends)
            and tokens <= prefill._answers.most_q
            and prefill._answers.paged(Batch.extend(*zip(*extends, strict=True)))
        )
        assert ours[0] == ((len(lens), 0, tokens, 0) if paged else own[0])
        changed += paged
    assert STEPS // 20 < changed < STEPS


def test_the_builders_are_as_they_were_after_every_step(engine: Engine) -> None:
    steered = _steered(engine)
    for lens in _steps(3)[:300]:
        steered.built(lens)
        assert steered.window.decode_threshold == steered.ratio.reorder_batch_threshold == 1


_CHANGED: Lens = [(5000, 1), (200_000, 8)]


@pytest.mark.parametrize("asked", ["", "0"])
def test_nothing_is_decided_unless_that_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv(V4_SWITCH, asked)

    assert _steered(engine).built(_CHANGED) == ((1, 1, 1, 8),) * 2


def test_a_long_prefix_with_few_new_tokens_is_not_widened(engine: Engine) -> None:
    assert _steered(engine).built(_CHANGED) == ((2, 0, 9, 0),) * 2
    assert _builders(engine, _config()).built(_CHANGED) == ((1, 1, 1, 8),) * 2


def test_capturing_drafting_and_replaying_are_left_alone(engine: Engine) -> None:
    window, ratio = _steered(engine)
    step = step_of(_CHANGED)

    assert window.build(0, step) == ratio.build(0, step) == (2, 0, 9, 0)
    assert window.build(0, step, False, object()) == (1, 1, 1, 8)
    for builder in (window, ratio):
        assert builder.build_for_cudagraph_capture(step) == (1, 1, 1, 8)
        assert builder.build_for_drafting(step, 0) == (1, 1, 1, 8)


@pytest.mark.parametrize(
    "changes",
    [{"mm_req_doc_ranges": {0: [(1, 5)]}}, {"causal": False}, {"seq_lens_cpu_upper_bound": None}],
    ids=["an image", "no causal mask", "no lengths on the host"],
)
def test_a_step_that_is_none_of_the_measured_is_left_alone(
    engine: Engine, changes: dict[str, Any]
) -> None:
    builders = _steered(engine)
    step = step_of(_CHANGED, **changes)

    assert builders.window.__dict__[ATTRIBUTE].threshold(step) is None


def test_one_builder_alone_is_not_changed(engine: Engine) -> None:
    builders = _builders(engine, _config())
    attach_v4(builders.window)

    assert builders.built(_CHANGED) == ((1, 1, 1, 8),) * 2


def test_a_builder_of_another_kind_ends_it_for_all(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """V4.1 and other kernels have subclasses, which split a step in ways of their own."""
    builders = _steered(engine)
    other = builder_of(type("Other", (type(builders.ratio),), {}), builders.ratio.vllm_config)
    attach_v4(other)

    assert builders.built(_CHANGED) == ((1, 1, 1, 8),) * 2
    assert "nothing is measured for Other" in caplog.text


def test_two_engines_of_a_process_do_not_mix(engine: Engine) -> None:
    one, other = _builders(engine, _config()), _builders(engine, _config())
    attach_v4(one.window)
    attach_v4(other.ratio)

    assert one.built(_CHANGED) == other.built(_CHANGED) == ((1, 1, 1, 8),) * 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cache_dtype": "auto"}, "a KV cache of auto"),
        ({"shape": {"vision_n_layers": 24}}, "images"),
        ({"speculative_config": SimpleNamespace(use_dspark=lambda: True)}, "DSpark"),
        ({"shape": {"compress_ratios": [8] * 61}}, "layers of these compression ratios: 8"),
        ({"shape": {"compress_ratios": [0, 0, *([1, 2] * 30)]}}, "compression ratios: 2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"shape": {"index_topk": 77}}, "index_topk 77"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_not_measured_is_left_alone(
    engine: Engine, changes: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    builders = _steered(engine, **changes)

    assert builders.built(_CHANGED) == ((1, 1, 1, 8),) * 2
    assert what in caplog.text


def test_a_draft_models_builder_is_left_alone(engine: Engine) -> None:
    builders = _steered(engine)
    draft = builder_of(
        type(builders.window), builders.window.vllm_config, decode_threshold=1,
        layer_names=["model.layers.61.self_attn.swa_cache"],
    )  # fmt: skip
    attach_v4(draft)

    assert ATTRIBUTE not in draft.__dict__
    assert builders.built(_CHANGED) == ((2, 0, 9, 0),) * 2


def test_a_fault_ends_it_for_both(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    builders = _steered(engine)
    builders.window.__dict__[ATTRIBUTE]._answers = None
    for _ in range(2):
        assert builders.built(_CHANGED) == ((1, 1, 1, 8),) * 2

    assert caplog.text.count("steering a V4 prefill failed, so vLLM decides by itself") == 1


def test_a_fault_of_the_engine_under_the_other_threshold_ends_it_for_both(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builders = _steered(engine)
    split = engine.names["split_decodes_and_prefills"]

    def faulty(batch: Any, decode_threshold: int) -> Any:
        if decode_threshold > 1:
            raise RuntimeError("made up")
        return split(batch, decode_threshold=decode_threshold)

    monkeypatch.setitem(engine.names, "split_decodes_and_prefills", faulty)

    assert builders.built(_CHANGED) == ((1, 1, 1, 8),) * 2
    assert builders.window.decode_threshold == 1
    assert caplog.text.count("preparing a steered V4 step failed") == 1


def test_drafts_are_decodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "decode_tokens", lambda _: 3)
    monkeypatch.setattr(v4_backend, "decode_tokens", lambda _: 3)
    builders = _steered(engine)

    assert builders.built([(200_000, 3)]) == ((0, 1, 0, 3),) * 2
    assert builders.built([(5000, 3), (200_000, 8)]) == ((2, 0, 11, 0),) * 2


def test_the_constructors_hook_runs_it_first(engine: Engine) -> None:
    builder = _builders(engine, _config()).window
    made: list[Any] = []
    around_v4_init(lambda *given: made.append(given), builder, 1, 2)

    assert made == [(builder, 1, 2)]
    assert ATTRIBUTE in builder.__dict__


def test_decisions_are_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    monkeypatch.setenv("NSA_TUNE_LOG", str(path))
    process_log.cache_clear()
    _steered(engine).built(_CHANGED)
    (decision,) = read_decisions(path)

    assert str(decision.batch) == "extend:200000+8"
    assert set(decision.own.values()) == {"sparse_fwd"}
    assert set(decision.taken.values()) == {"with_kvcache"}
