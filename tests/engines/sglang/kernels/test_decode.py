"""nsa-tune's kernel in decode graphs: which calls it answers, which sizes get it, and when."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang.kernels.decode import DECODE, DecodeCall, around_fa3
from nsa_tune.engines.sglang.kernels.swap import Timing, Wins
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


_Backend._forward_fa3 = wrapped(_Backend._forward_fa3, around_fa3)  # type: ignore[method-assign]


@pytest.fixture
def backend() -> Iterator[Any]:
    """A backend for which nsa-tune's kernel was faster at 1 and 2 rows, and not at 4."""
    made = _Backend()
    timings = [Timing((1,), 30.0, 20.0), Timing((2,), 30.0, 20.0), Timing((4,), 30.0, 30.0)]
    DECODE.wins, DECODE.owner = Wins(timings, 0.03, beyond=False), made
    yield made
    DECODE.forget()


def _capturing(monkeypatch: pytest.MonkeyPatch, *, yes: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: yes)


def test_a_call_is_answered_as_the_reference_does(kernel_device: torch.device) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("tests/gpu compares with SGLang's own kernel")
    named = _call()
    call = DecodeCall.of(named)
    assert call is not None
    q = torch.cat((named["q_nope"], named["q_rope"]), dim=-1)
    pool = named["kv_cache"].view(SLOTS, -1)
    wanted = sparse_mla_reference(q, pool, named["page_table"], 0.1, RANK)

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
    assert DecodeCall.of(_call(**changes)) is None


def test_only_graphs_of_the_sizes_at_which_it_is_faster_get_it(
    backend: Any, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    if kernel_device.type != "cpu":
        pytest.skip("made-up tensors of a CPU")
    _capturing(monkeypatch, yes=True)

    assert isinstance(backend._forward_fa3(**_call(2)), torch.Tensor)
    for rows in (3, 4, 5):
        assert backend._forward_fa3(**_call(rows)) == "SGLang's"
    assert backend._forward_fa3(**_call(2, page_size=64)) == "SGLang's"
    assert _Backend()._forward_fa3(**_call(2)) == "SGLang's", "a draft model's, say"
    _capturing(monkeypatch, yes=False)
    assert backend._forward_fa3(**_call(2)) == "SGLang's"


def test_after_an_error_sglangs_kernel_runs_for_good(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _capturing(monkeypatch, yes=True)

    assert backend._forward_fa3(**_call(1, q_nope=None)) == "SGLang's"
    assert DECODE.wins is None


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
