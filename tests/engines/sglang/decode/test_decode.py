"""nsa-tune's kernel in decode graphs: which calls it answers, which sizes get it, and when."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.backend.kernels.split_sparse_mla import split_sparse_mla_reference
from nsa_tune.engines.hooking import wrapped
from nsa_tune.engines.sglang.decode import calibration, eligible, hooks
from nsa_tune.engines.sglang.decode.calibration import Call, DecodeTime, wins
from tests.engines.sglang.wheels import BACKEND, VERSIONS, wheel_of
from tests.engines.wheels import Unreachable

HEADS, RANK, ROPE, TOPK, SLOTS = 4, 32, 16, 64, 200


def _call(rows: int = 2, **changes: Any) -> dict[str, Any]:
    """What SGLang passes to `_forward_fa3`, small."""
    generator = torch.Generator().manual_seed(rows)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    slots = torch.randint(SLOTS, (rows, TOPK), generator=generator, dtype=torch.int32)
    slots[0, 5:] = -1
    return {
        "q_nope": values(HEADS, rows, RANK).transpose(0, 1), "q_rope": values(rows, HEADS, ROPE),
        "kv_cache": values(SLOTS, 1, RANK + ROPE), "v_head_dim": RANK, "page_table": slots,
        "cache_seqlens": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": 1,
        "sm_scale": 0.1, "logit_cap": 0.0, "page_size": 1,
    } | changes  # fmt: skip


class _Backend:
    def _forward_fa3(self, **named: Any) -> str:
        return "SGLang's"


_Backend._forward_fa3 = wrapped(_Backend._forward_fa3, hooks.around_fa3)  # type: ignore[method-assign]


def _backend(**changes: Any) -> Any:
    backend = _Backend()
    attributes = {"dsa_decode_impl": "fa3", "num_splits": 0, "hisparse_coordinator": None}
    vars(backend).update(attributes | changes)
    return backend


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def _capturing(monkeypatch: pytest.MonkeyPatch, *, yes: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: yes)


def test_a_call_is_answered_as_the_reference_does(kernel_device: torch.device) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("tests/gpu compares with SGLang's own kernel")
    named = _call()
    call = Call.of(named)
    assert call is not None
    q = torch.cat((named["q_nope"], named["q_rope"]), dim=-1)
    pool = named["kv_cache"].view(SLOTS, -1)
    wanted = split_sparse_mla_reference(q, pool, named["page_table"], 0.1, RANK)

    out = call.attended()

    assert out.shape == (2, HEADS, RANK)
    assert float((out.float() - wanted.float()).norm() / wanted.float().norm()) < 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seqlen_q": 2},
        {"page_size": 64},
        {"logit_cap": 30.0},
        {"page_table": torch.zeros(3, TOPK, dtype=torch.int32)},
        {"page_table": torch.zeros(2, TOPK, dtype=torch.int64)},
        {"page_table": torch.zeros(2, 2 * TOPK, dtype=torch.int32)[:, ::2]},
        {"kv_cache": torch.zeros(SLOTS, 1, RANK + ROPE)},
        {"q_rope": torch.zeros(2, ROPE, HEADS, dtype=torch.bfloat16).transpose(1, 2)},
    ],
)
def test_other_calls_are_left_to_sglang(changes: dict[str, Any]) -> None:
    assert Call.of(_call(**changes)) is None


def test_sizes_between_two_that_are_faster_get_the_kernel() -> None:
    times = [DecodeTime(1, 30.0, 20.0), DecodeTime(4, 33.0, 25.0), DecodeTime(8, 36.0, 35.5)]

    assert wins(times) == {1, 2, 3, 4}
    assert wins([DecodeTime(2, 30.0, 20.0)]) == {1, 2}
    assert wins([DecodeTime(1, 20.0, 20.0), DecodeTime(2, 30.0, 20.0)]) == set()


def test_only_graphs_of_these_sizes_get_it(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("made-up tensors of a CPU")
    backend = _backend(_nsa_tune_decode_rows=frozenset({1, 2}))
    _capturing(monkeypatch, yes=True)

    assert isinstance(backend._forward_fa3(**_call(2)), torch.Tensor)
    assert backend._forward_fa3(**_call(3)) == "SGLang's"
    assert backend._forward_fa3(**_call(2, page_size=64)) == "SGLang's"
    _capturing(monkeypatch, yes=False)
    assert backend._forward_fa3(**_call(2)) == "SGLang's"


def test_without_a_measurement_sglangs_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _capturing(monkeypatch, yes=True)

    assert _backend()._forward_fa3(**_call(1)) == "SGLang's"


def test_after_an_error_sglangs_kernel_runs_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(_nsa_tune_decode_rows=frozenset({1}))
    _capturing(monkeypatch, yes=True)

    assert backend._forward_fa3(**_call(1, q_nope=None)) == "SGLang's"
    assert "_nsa_tune_decode_rows" not in vars(backend)


def test_an_engines_start_measures_and_uses_what_wins(
    monkeypatch: pytest.MonkeyPatch, hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    times = [DecodeTime(1, 32.1, 21.7), DecodeTime(2, 32.6, 33.0)]
    monkeypatch.setattr(hooks, "measure", lambda backend, original: iter(times))
    backend = _backend()
    caplog.set_level("INFO")

    hooks.attach(SimpleNamespace(is_draft_worker=False, attn_backend=backend))

    assert backend._nsa_tune_decode_rows == {1}
    assert "32 to 22 us at 1" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dsa_decode_impl": "flashmla_kv"}, "fa3"),
        ({"num_splits": 1}, "deterministic"),
        ({"hisparse_coordinator": object()}, "HiSparse"),
        ({"dcp_size": 2}, "context parallelism"),
    ],
)
def test_other_engines_are_left_alone(hopper: None, changes: dict[str, Any], reason: str) -> None:
    found = eligible.why_not(SimpleNamespace(attn_backend=_backend(**changes)))

    assert found is not None and reason in found


def test_a_switch_and_other_gpus_leave_it_to_sglang(
    monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    runner = SimpleNamespace(attn_backend=_backend())
    assert eligible.why_not(runner) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "Hopper" in str(eligible.why_not(runner))
    monkeypatch.setenv(eligible.DECODE_SWITCH, "0")
    assert "NSA_TUNE_DECODE" in str(eligible.why_not(runner))


def test_a_kernel_that_computes_something_else_is_refused() -> None:
    ones = torch.ones(2, 3)
    calibration._compare(ones, ones * 1.001)
    for wrong in (ones * 1.1, ones * float("nan")):
        with pytest.raises(RuntimeError, match="away from SGLang's"):
            calibration._compare(ones, wrong)


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_sglang_calls_it_by_keywords_with_a_selection_as_page_table(version: str) -> None:
    try:
        tree = wheel_of(version).tree(BACKEND)
    except Unreachable as reason:
        pytest.skip(f"the wheel of SGLang {version} cannot be had: {reason}")
    calls = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and getattr(one.func, "attr", None) == "_forward_fa3"
    ]

    assert len(calls) == 2, "an extend, which verifies drafts too, and a decode"
    for call in calls:
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert not call.args
        assert set(given) == set(_call())
        assert given["page_size"] == "1"
        assert given["page_table"] == "page_table_1"
