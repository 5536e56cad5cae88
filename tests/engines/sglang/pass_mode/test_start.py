"""A made-up engine starts: its passes are measured and steered, and errors leave it alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang import last_start, switch
from nsa_tune.engines.sglang.eligible import why_not
from nsa_tune.engines.sglang.pass_mode import start as module
from nsa_tune.engines.sglang.pass_mode.calibration import Case
from nsa_tune.engines.sglang.pass_mode.hooks import around_forward, around_init_graphs
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.proof import Proof
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.releases import release_of
from tests.engines.sglang.pass_mode.fakes import (
    Mode,
    Speculation,
    batch,
    original,
)

KEY = {"gpu": "made up", "prefill_sizes": [512], "decode_sizes": [256], "whole_pass_sizes": {}}
_key, _why_not = module._key, module._why_not
RIGHT = Proof(dict.fromkeys(PassMode, 0.01), 0.05, {})
MEASURED = [
    PassTime(PassMode.ENGINE, 512, 20000, 100_000.0, selects=True),
    PassTime(PassMode.DECODE_GRAPH, 256, 20000, 30_000.0),
]
CASES = [
    Case(PassMode.ENGINE, 512, 19743, (512,)), Case(PassMode.DECODE_GRAPH, 256, 19871, (256,)),
]  # fmt: skip
KERNEL = replace(MEASURED[0], mode=PassMode.TABLE_KERNEL, pass_us=50_000.0)


class _Group:
    rank_in_group = 0
    world_size = 1


class Runner:
    """SGLang's ModelRunner."""

    is_draft_worker = False
    spec_algorithm = Speculation.NONE
    tp_group = _Group()

    def __init__(self) -> None:
        self.passes: list[Any] = []
        self.attn_backend = SimpleNamespace(
            dsa_index_topk=2048, num_q_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64
        )
        self.model_config = SimpleNamespace(v_head_dim=128)
        self.token_to_kv_pool = SimpleNamespace()

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> str:
        self.prefill_cuda_graph_runner = SimpleNamespace(
            capture_num_tokens=[128, 512], backend=SimpleNamespace()
        )
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[8, 256])
        return "captured"

    def _forward_raw(self, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        return original(self.passes)(self, forward_batch, *rest)


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks on the runner; nothing speaks against steering it, and passes take what is made up."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    hooked: dict[str, Callable[..., Any]] = {
        "init_cuda_graphs": around_init_graphs, "_forward_raw": around_forward,
    }  # fmt: skip
    for name, hook in hooked.items():
        monkeypatch.setattr(Runner, name, wrapped(getattr(Runner, name), hook))
    monkeypatch.setattr(module, "_why_not", lambda runner: None)
    monkeypatch.setattr(module, "why_not", lambda part, engine: None)
    monkeypatch.setattr(module, "_key", lambda runner, graphs: KEY)
    monkeypatch.setattr(module, "cases", lambda runner, steering, known: CASES)
    monkeypatch.setattr(module, "measure", lambda runner, steering, some: MEASURED)
    monkeypatch.setattr(module, "prove", lambda runner, steering, ranks: RIGHT)
    monkeypatch.setattr(module, "sentinels", lambda runner: ())
    monkeypatch.setattr(module, "RegressionMonitor", lambda clock: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    yield
    switch.resume()


def _started() -> Runner:
    runner = Runner()
    assert runner.init_cuda_graphs() == "captured"
    return runner


def _modes(runner: Runner, **named: Any) -> list[Mode]:
    """The modes of the passes by which a short turn runs."""
    runner.passes.clear()
    runner._forward_raw(batch([8192], [200]), None, **named)
    return [one.forward_mode for one in runner.passes]


def test_a_started_engine_is_steered() -> None:
    assert _modes(_started()) == [Mode.DECODE]


def test_what_the_seconds_went_to_is_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nsa_tune.sglang")
    _started()
    (line,) = [one for one in caplog.messages if one.startswith("the plug-in took")]
    assert "(comparing kernels 0.0, comparing passes 0.0, timing passes 0.0)" in line
    assert str(last_start.kept("start")).endswith(line)


def test_an_engine_that_has_not_captured_is_not() -> None:
    assert _modes(Runner()) == [Mode.EXTEND]


def test_a_paused_plug_in_leaves_passes_to_the_engine() -> None:
    runner = _started()
    switch.pause()
    assert _modes(runner) == [Mode.EXTEND]

    switch.resume()
    assert _modes(runner) == [Mode.DECODE]


def test_a_pass_with_arguments_that_are_not_known_is_the_engines() -> None:
    assert _modes(_started(), split_forward_count=2) == [Mode.EXTEND]


def test_a_second_start_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    _started()
    assert len(list(remembered.remembered())) == 1

    def never(*given: Any) -> list[PassTime]:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "measure", never)
    assert _modes(_started()) == [Mode.DECODE]


def test_another_version_of_the_engine_measures_a_few_passes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _started()
    monkeypatch.setattr(module, "_key", lambda runner, graphs: {**KEY, "sglang": "0.5.24"})
    asked = _measuring(monkeypatch, 1.1)

    assert _modes(_started()) == [Mode.DECODE]
    assert asked == [CASES]


def _measuring(
    monkeypatch: pytest.MonkeyPatch, *factors: float, kernel: float = 1.0
) -> list[list[Case]]:
    """The cases of each time that passes are measured; they take so many times what is known."""
    asked: list[list[Case]] = []
    known = {time.mode: time for time in (*MEASURED, KERNEL)}

    def measure(runner: Runner, steering: Steering, some: list[Case]) -> list[PassTime]:
        asked.append([*some])
        scales = dict(zip((case.mode for case in some), factors * len(some), strict=False))
        return [
            replace(known[mode], pass_us=scale * known[mode].pass_us)
            for mode, scale in scales.items()
        ]

    monkeypatch.setattr(module, "measure", measure)
    return asked


def test_a_table_that_chooses_another_kernel_has_it_timed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a table of the same name: what was kept must not outlive what it chose."""
    by_table = replace(CASES[0], mode=PassMode.TABLE_KERNEL)
    monkeypatch.setattr(module, "cases", lambda runner, steering, known: [*CASES, by_table])
    monkeypatch.setattr(module, "source_of", lambda backend: "a table")
    asked = _measuring(monkeypatch, 1.0)
    chosen = "fa3"
    monkeypatch.setattr(module, "chosen", lambda *given: chosen)
    _started()
    _started()
    chosen = "flashmla_sparse"
    _started()

    assert asked == [[*CASES, by_table], [by_table]]
    assert [len(one.times) for one in remembered.remembered()] == [3, 3]
    monkeypatch.setattr(module, "chosen", lambda *given: None)
    assert PassMode.TABLE_KERNEL not in {time.mode for time in _started_times()}


def _started_times() -> tuple[PassTime, ...]:
    steering: Steering = _started().__dict__[module.STEERING]
    assert steering.times is not None
    return steering.times.times


def test_where_known_times_do_not_hold_only_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few passes have shown that: what these took is known by now."""
    key = {**KEY, "prefill_sizes": [128, 256, 512]}
    some = [replace(CASES[0], size=size, prefix=0, lens=(size,)) for size in (128, 256, 512)]
    asked: list[list[int]] = []
    factors = {128: 1.0, 256: 2.0, 512: 1.0}

    def measure(runner: Runner, steering: Steering, some: list[Case]) -> list[PassTime]:
        asked.append([case.size for case in some])
        return [
            replace(case.unmeasured(2048), pass_us=1e3 * case.size * factors[case.size])
            for case in some
        ]

    monkeypatch.setattr(module, "_key", lambda runner, graphs: key)
    monkeypatch.setattr(module, "cases", lambda runner, steering, known: some)
    monkeypatch.setattr(module, "measure", measure)
    _started()
    monkeypatch.setattr(module, "_key", lambda runner, graphs: {**key, "sglang": "0.5.24"})
    factors[256] = 1.0
    times = _started_times()

    assert asked == [[128, 256, 512], [128, 256], [512]]
    assert [time.pass_us for time in times] == [128e3, 256e3, 512e3]


def test_a_way_that_was_found_wrong_is_off_whatever_its_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its times are known from a start in which it was right."""
    _started()
    wrong = Proof(RIGHT.errors, 0.05, {PassMode.DECODE_GRAPH: "its logits are far away"})
    monkeypatch.setattr(module, "prove", lambda runner, steering, ranks: wrong)
    caplog.set_level("INFO")

    assert _modes(_started()) == [Mode.EXTEND]
    assert "decode_graph off (its logits are far away)" in caplog.text
    (kept,) = remembered.remembered()
    assert kept.verdicts["decode_graph"] == "off (its logits are far away)"


def test_a_way_that_is_nowhere_faster_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = [replace(time, pass_us=99_000.0) for time in MEASURED]
    monkeypatch.setattr(module, "measure", lambda runner, steering, some: slow)
    caplog.set_level("INFO")

    assert _modes(_started()) == [Mode.EXTEND]
    assert "decode_graph off (nowhere more than 3% faster)" in caplog.text


@pytest.mark.parametrize(
    ("table", "verdict"),
    [
        (None, "off (no table chooses kernels here)"),
        ("a table", "on (no pass of it was timed; its logits differ by 0.010, 0.050 are allowed)"),
    ],
)
def test_a_tables_kernels_that_no_pass_was_timed_with_are_its_own_choice(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    table: str | None,
    verdict: str,
) -> None:
    """Dense MLA has no table, and so nothing that could be on."""
    monkeypatch.setattr(module, "source_of", lambda backend: table)
    caplog.set_level("INFO")

    _started()
    assert f"table_kernel {verdict}" in caplog.text


def test_a_way_that_nothing_was_compared_by_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool may have no room for it."""
    monkeypatch.setattr(module, "prove", lambda runner, steering, ranks: Proof({}, 0.05, {}))
    caplog.set_level("INFO")

    assert _modes(_started()) == [Mode.EXTEND]
    assert "decode_graph off (no batch to compare it by has room)" in caplog.text


def test_a_proof_that_fails_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(runner: Any, steering: Any, ranks: Any) -> Proof:
        raise RuntimeError("made up: SGLang's own pass failed")

    monkeypatch.setattr(module, "prove", fails)

    assert _modes(_started()) == [Mode.EXTEND]
    assert "SGLang's own pass failed" in caplog.text


def test_a_second_start_elsewhere_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _started()
    monkeypatch.setattr(module, "_key", lambda runner, graphs: {"gpu": "other"})
    _started()

    assert len(list(remembered.remembered())) == 2


def test_times_are_valid_for_engines_in_which_passes_take_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = SimpleNamespace(
        profile=SimpleNamespace(name="v3.2"), layers=61, heads=16, kv_dtype="bf16", impl="fa3"
    )
    monkeypatch.setattr(module, "facts_of", lambda *_: facts)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    runner = _started()
    runner.attn_backend.dsa_decode_impl = "fa3"
    runner.attn_backend.speculative_num_draft_tokens = None
    model = SimpleNamespace(hidden_size=7168, context_len=163_840)
    runner.model_config = model

    def key(slots: int = 300_000, **changes: Any) -> str:
        runner.max_total_num_tokens = slots  # type: ignore[attr-defined]
        arguments: dict[str, Any] = {"quantization": "fp8", "moe_runner_backend": "triton"}
        given = SimpleNamespace(tp_size=1, **(arguments | changes))
        runner.server_args = given  # type: ignore[attr-defined]
        return json.dumps(_key(runner, runner.prefill_cuda_graph_runner))

    # How much memory is free, and so how large the pool is, differs from start to start.
    assert key() == key(300_064)
    assert key() != key(60_000)
    assert key(100_000) == key(100_064), "also of a small pool"
    others: list[dict[str, Any]] = [
        {"quantization": None},
        {"moe_runner_backend": "deep_gemm"},
        {"ep_size": 8},
        # Weights that are made up route tokens otherwise; all-reduces take longer between hosts.
        {"load_format": "dummy"},
        {"nnodes": 2},
        {"disable_custom_all_reduce": True},
    ]
    assert len({key(), *(key(**one) for one in others)}) == 1 + len(others)
    plain = key()
    runner.attn_backend.speculative_num_draft_tokens = 2
    assert key() != plain
    runner.attn_backend.speculative_num_draft_tokens = None
    model.hf_text_config = SimpleNamespace(index_topk_freq=4, index_skip_topk_offset=3)
    assert key() != plain, "most layers of GLM-5.2 run no indexer, those of GLM-5 do"


def test_ranks_without_the_same_hooks_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that could not hook a method would run a graph where the others run none."""
    release = release_of("0.5.17")
    assert release is not None
    monkeypatch.setattr(module, "installed_release", lambda: release)
    deciding = [one for one in release.symbols if one.name in module._DECIDE]
    for symbol in deciding:
        owner, _, name = symbol.path.rpartition(".")
        loaded = sys.modules.get(symbol.module, ModuleType(symbol.module))
        kind = getattr(loaded, owner, type(owner, (), {}))
        setattr(kind, name, wrapped(lambda self: None, around_forward))
        setattr(loaded, owner, kind)
        monkeypatch.setitem(sys.modules, symbol.module, loaded)

    assert set(module._hooks()) == module._DECIDE
    can_run = next(one for one in deciding if one.name == "can_run")
    owner, _, name = can_run.path.rpartition(".")
    setattr(getattr(sys.modules[can_run.module], owner), name, lambda self: None)
    assert set(module._hooks()) == module._DECIDE - {"can_run"}
    monkeypatch.delitem(sys.modules, can_run.module)
    assert "can_run" not in module._hooks()


def test_while_passes_are_measured_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(runner: Runner, steering: Steering, only: Any) -> list[PassTime]:
        seen.extend(_modes(runner))
        steering.forced = PassMode.DECODE_GRAPH
        seen.extend(_modes(runner))
        steering.forced = None
        return MEASURED

    monkeypatch.setattr(module, "measure", measure)
    _started()

    assert seen == [Mode.EXTEND, Mode.DECODE]


def test_an_error_while_measuring_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> list[PassTime]:
        raise RuntimeError("made up")

    monkeypatch.setattr(module, "measure", fails)
    runner = _started()

    assert _modes(runner) == [Mode.EXTEND]
    assert module.STEERING not in runner.__dict__
    assert "proving how passes run failed" in caplog.text
    assert list(remembered.remembered()) == []


@pytest.mark.parametrize("name", ["load", "save"])
def test_times_that_cannot_be_kept_stop_no_rank(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first rank reads and writes them: the others would go on without it."""

    def fails(*arguments: Any) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(remembered, name, fails)

    assert _modes(_started()) == [Mode.DECODE]
    assert "times of passes failed" in caplog.text


def test_measuring_that_is_interrupted_leaves_no_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops a process is not held up, and leaves nothing half done."""

    def stops(*given: Any) -> list[PassTime]:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure", stops)
    runner = Runner()
    with pytest.raises(KeyboardInterrupt):
        runner.init_cuda_graphs()

    assert _modes(runner) == [Mode.EXTEND]


@pytest.mark.parametrize("name", ["_why_not", "why_not", "_key"])
def test_an_error_while_looking_at_the_engine_leaves_it_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise AttributeError("made up")

    monkeypatch.setattr(module, name, fails)

    assert _modes(_started()) == [Mode.EXTEND]


def test_v4_is_told_of_prefill_graphs_where_none_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", why_not)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]))
    runner = SimpleNamespace(attn_backend=object(), model_config=config)
    assert "by --cuda-graph-backend-prefill breakable" in str(_why_not(runner))
    runner.prefill_cuda_graph_runner = SimpleNamespace(capture_num_tokens=[8])
    assert "breakable" not in str(_why_not(runner))


def test_an_engine_without_prefill_graphs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any) -> None:
        self.prefill_cuda_graph_runner = None

    monkeypatch.setattr(Runner, "init_cuda_graphs", wrapped(none, around_init_graphs))
    released: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: released.append(True))
    runner = Runner()
    runner.init_cuda_graphs()

    assert _modes(runner) == [Mode.EXTEND]
    assert released, "kernels were compared all the same"


@pytest.mark.parametrize("change", ["a reason against it", "an error"])
def test_an_engine_that_captures_anew_and_is_left_alone_is_not_steered_by_old_graphs(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _started()
    caplog.set_level("INFO")

    def found(runner: Any) -> str:
        if change == "an error":
            raise AttributeError("made up")
        return "it is Tuesday"

    monkeypatch.setattr(module, "_why_not", found)
    runner.init_cuda_graphs()

    assert _modes(runner) == [Mode.EXTEND]
    assert change == "an error" or "how prefills run: it is Tuesday" in caplog.text


def test_while_an_engine_captures_anew_nothing_is_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang runs passes to warm up, and the graphs are others."""
    runner = _started()
    seen: list[Mode] = []

    def captures(self: Runner) -> None:
        seen.extend(_modes(self))

    monkeypatch.setattr(Runner, "init_cuda_graphs", wrapped(captures, around_init_graphs))
    runner.init_cuda_graphs()

    assert seen == [Mode.EXTEND]


def test_times_without_any_time_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that anybody may have emptied would leave the engine as it is for ever."""
    monkeypatch.setattr(module, "measure", lambda runner, steering, some: [])
    _started()
    monkeypatch.setattr(module, "measure", lambda runner, steering, some: MEASURED)

    assert _modes(_started()) == [Mode.DECODE]


def test_a_rank_that_cannot_be_steered_says_so_before_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once all have agreed, they wait for each other."""

    def fails(*arguments: Any, **named: Any) -> None:
        raise AttributeError("made up")

    said: list[str] = []
    monkeypatch.setattr(Ranks, "agree", lambda self, question, answer: said.append(question))
    monkeypatch.setattr(module, "Steering", fails)
    _started()

    assert "pass_mode" not in said


def test_ranks_that_do_not_agree_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ranks, "agree", lambda self, question, answer: False)

    assert _modes(_started()) == [Mode.EXTEND]
    assert "ranks do not agree, and this one says" in caplog.text and "'gpu': " in caplog.text


def test_a_draft_worker_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some ranks may have one."""

    def never(self: Any, question: str, answer: str) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(Ranks, "agree", never)
    monkeypatch.setattr(Runner, "is_draft_worker", True)
    runner = _started()

    assert _modes(runner) == [Mode.EXTEND]


@pytest.mark.parametrize(
    ("known", "proof", "stays"),
    [
        (True, Proof(RIGHT.errors, 0.05, {PassMode.TABLE_KERNEL: "wrong"}), True),
        (False, RIGHT, True),
        (False, Proof(RIGHT.errors, 0.05, {PassMode.TABLE_KERNEL: "wrong"}), False),
        (False, None, False),
    ],
)
def test_of_a_release_that_is_not_known_the_table_must_be_proven(
    known: bool, proof: Proof | None, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(*given: Any) -> Proof:
        if proof is None:
            raise RuntimeError("made up")
        return proof

    release = SimpleNamespace(known=known)
    monkeypatch.setattr(module, "installed_release", lambda: release)
    monkeypatch.setattr(module, "source_of", lambda backend: "a table")
    monkeypatch.setattr(module, "prove", prove)
    detached: list[Any] = []
    monkeypatch.setattr(module, "detach", detached.append)
    runner = _started()

    assert detached == ([] if stays else [runner.attn_backend])
