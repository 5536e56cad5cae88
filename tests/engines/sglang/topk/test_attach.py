"""What happens at an engine's start: eligible or not, measured, and used from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.backend.kernels import sampled_topk as kernels
from nsa_tune.backend.kernels.topk_transform import Transform, transform_reference
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.topk import calibration, eligible, hooks
from nsa_tune.engines.sglang.topk.call import Call
from nsa_tune.engines.sglang.topk.times import TopkTime
from tests.engines.sglang.topk.engine import Engine
from tests.engines.sglang.wheels import Wheel

CPU = torch.device("cpu")


@pytest.fixture
def engine(newest: Wheel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The newest release on a made-up Hopper GPU, where everything may be measured."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(eligible, "parallel", lambda: SimpleNamespace(attn_cp_size=1))
    monkeypatch.setattr(hooks, "check", lambda topk, device: None)
    monkeypatch.setattr(hooks, "measure", measured)
    found = Engine(newest, monkeypatch)
    modules = SimpleNamespace(TopkTransformMethod=found.methods)
    monkeypatch.setattr(hooks, "import_module", lambda name: modules)
    return found


def measured(
    original: Callable[..., Any], backend: Any, topk: int, method: Any, device: Any
) -> Iterator[TopkTime]:
    yield TopkTime(method.name, 64, 3072, 30.0, 20.0)
    yield TopkTime(method.name, 1024, 3072, 300.0, 100.0)


def runner(engine: Engine, **changes: Any) -> Any:
    attributes: dict[str, Any] = {
        "dsa_topk_backend": engine.backend, "dsa_index_topk": 2048, "use_fused_topk": True,
        "num_splits": 0, "hisparse_coordinator": None, "dsa_kv_cache_store_fp8": False,
    }  # fmt: skip
    return SimpleNamespace(
        is_draft_worker=False, attn_backend=SimpleNamespace(**attributes | changes)
    )


def attached(engine: Engine, **changes: Any) -> set[str]:
    """The methods that are measured and used after a start."""
    backend = runner(engine, **changes)
    hooks.attach(backend)
    times = hooks.attached(backend.attn_backend)
    return set() if times is None else {one.method for one in times.times}


def test_a_started_engine_uses_what_was_measured(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    assert attached(engine) == {"PAGED"}
    assert "faster at 2 of 2 measured sizes, 300 to 100 us at 1024 rows of 3072" in caplog.text
    assert "faster at 2 of 2 measured sizes" in (last_start.kept("topk") or "")


def test_over_an_fp8_pool_both_methods_are_measured(engine: Engine) -> None:
    assert attached(engine, dsa_kv_cache_store_fp8=True) == {"PAGED", "RAGGED"}


def test_a_method_that_cannot_be_measured_leaves_the_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(original: Any, backend: Any, topk: int, method: Any, device: Any) -> list[TopkTime]:
        if method.name == "RAGGED":
            raise RuntimeError("it does not compile")
        return list(measured(original, backend, topk, method, device))

    monkeypatch.setattr(hooks, "measure", some)

    assert attached(engine, dsa_kv_cache_store_fp8=True) == {"PAGED"}


def test_it_says_when_nothing_is_faster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(hooks, "measure", lambda *given: [TopkTime("PAGED", 64, 3072, 9.0, 9.0)])

    hooks.attach(runner(engine))

    assert "SGLang selects keys by itself: it is as fast" in caplog.text


def test_a_draft_worker_measures_nothing(engine: Engine) -> None:
    draft = runner(engine)
    draft.is_draft_worker = True

    hooks.attach(draft)

    assert hooks.attached(draft.attn_backend) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_fused_topk": False}, "does not fuse"),
        ({"num_splits": 1}, "deterministic"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"dsa_index_kpool": 2}, "pooled"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"_kv_shard_pool": object()}, "sharded"),
        ({"dsa_index_topk": 4096}, "selects up to 2048 keys, not 4096"),
    ],
)
def test_other_engines_are_left_alone(
    engine: Engine, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    assert attached(engine, **changes) == set()
    assert reason in caplog.text and reason in (last_start.kept("topk") or "")


def test_another_kernel_of_sglang_is_left_alone(engine: Engine) -> None:
    assert attached(engine, dsa_topk_backend=engine.kind.FLASHINFER) == set()


def test_another_attention_is_left_alone_and_says_nothing_to_the_doctor(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    hooks.attach(SimpleNamespace(is_draft_worker=False, attn_backend=SimpleNamespace()))

    assert "this model's attention is not DSA" in caplog.text
    assert last_start.kept("topk") is None


@pytest.mark.parametrize("value", ["0", "off", "No"])
def test_the_switch_leaves_it_to_sglang(
    engine: Engine, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TUNE_TOPK", value)

    assert attached(engine) == set()


def test_a_selection_of_one_rank_for_all_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", "1")

    assert attached(engine) == set()


def test_context_parallelism_is_left_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "parallel", lambda: SimpleNamespace(attn_cp_size=2))

    assert attached(engine) == set()


def test_a_method_without_the_hook_is_left_alone(engine: Engine) -> None:
    engine.kind.topk_transform = engine.kind.topk_transform.__wrapped__

    assert attached(engine) == set()


def test_an_old_gpu_is_left_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))

    assert attached(engine) == set()


def _exact(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    count: int,
    starts: torch.Tensor,
    shape: kernels.Shape | None,
    transform: Transform,
) -> torch.Tensor:
    """nsa-tune's kernel, by torch."""
    del shape
    places = kernels.sampled_topk_reference(scores, lengths, count, starts)
    return transform_reference(places, transform)


def test_every_variant_of_the_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[kernels.Shape] = set()

    def noted(*given: Any) -> torch.Tensor:
        seen.add(given[4])
        return _exact(*given)

    monkeypatch.setattr(kernels, "sampled_topk", noted)

    calibration.check(2048, CPU)

    assert seen == set(kernels.shapes())


@pytest.mark.parametrize("row", [1, 4, 7])
def test_a_wrong_selection_is_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> torch.Tensor:
        found = _exact(*given)
        found[row, 0] += 1
        return found

    monkeypatch.setattr(kernels, "sampled_topk", wrong)

    with pytest.raises(RuntimeError, match="selects wrongly with Shape"):
        calibration.check(2048, CPU)


@pytest.mark.parametrize("method", ["PAGED", "RAGGED"])
def test_both_are_timed_on_the_same_calls(
    engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
        given = (call.lengths, call.topk, call.row_starts, None, call.transform)
        return lambda logits: _exact(logits, *given)

    monkeypatch.setattr(calibration, "selection_of", exact)
    # Not all sizes fit: that leaves the small ones, which a CPU can select from.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (128 * 6144 * 16, 0))

    def compared(ways: Any) -> tuple[float, float]:
        engines, own = (way().sort(1).values for way in ways)
        # Random numbers: few rows, if any, have equal ones where the selection ends.
        assert (engines != own).any(1).sum() <= 2
        return 2.0, 1.0

    monkeypatch.setattr(calibration, "timed_us", compared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    original = engine.kind.topk_transform.__wrapped__

    times = list(calibration.measure(original, engine.backend, 2048, engine.methods[method], CPU))

    assert [(one.rows, one.keys) for one in times] == [
        (64, 3072), (64, 6144), (64, 12288), (128, 3072), (128, 6144), (256, 3072),
    ]  # fmt: skip
    assert {one.method for one in times} == {method}
