"""What queries share: which calls are sampled, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.hooking import wrapped
from nsa_tune.engines.sglang import last_start, switch
from nsa_tune.engines.sglang import overlap as module
from nsa_tune.engines.sglang.overlap import KEPT_AS, OVERLAP, Overlap, counted

TOPK, SLOTS, ROWS = 16, 200, 24


def sharing(rows: int, topk: int, percent: int, keys: int) -> torch.Tensor:
    """[rows, topk] below `keys`: of the keys of a row the one before it selects `percent`."""
    order = torch.randperm(keys)
    first = torch.arange(rows)[:, None] * round((1 - percent / 100) * topk)
    return order[(first + torch.arange(topk)) % keys].int()


class Event:
    """An event that the device reaches when a test says so."""

    reached = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.reached


class Mode(Enum):
    EXTEND, DECODE = 1, 2


def a_pass(mode: Mode, *lens: int) -> Any:
    return SimpleNamespace(
        forward_mode=mode, tbo_children=None, tbo_parent_token_range=None,
        extend_seq_lens_cpu=list(lens),
    )  # fmt: skip


PREFILL = a_pass(Mode.EXTEND, 4000)


class Backend:
    dsa_index_topk = TOPK

    def _forward_flashmla_sparse(self, **named: Any) -> str:
        return "FlashMLA"

    def _forward_fa3(self, **named: Any) -> str:
        return "FlashAttention-3"


Backend._forward_flashmla_sparse = wrapped(  # type: ignore[method-assign]
    Backend._forward_flashmla_sparse, module.around_sparse
)
Backend._forward_fa3 = wrapped(  # type: ignore[method-assign]
    Backend._forward_fa3, module.around_fa3
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Backend]:
    """A backend whose calls are sampled from the first on."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_ROWS", 8)
    monkeypatch.setattr(module, "_CALLS", 1)
    monkeypatch.setattr(OVERLAP, "_event", Event)
    Event.reached = True
    made = Backend()
    module.start(SimpleNamespace(is_draft_worker=False, attn_backend=made))
    OVERLAP.begin(made, PREFILL)
    yield made
    OVERLAP.stop()
    switch.resume()


def serve(backend: Backend, count: int = 9, percent: int = 100, rows: int = ROWS) -> None:
    """Some calls of a pass's layers."""
    for _ in range(count):
        indices = sharing(rows, TOPK, percent, SLOTS)
        assert backend._forward_flashmla_sparse(page_table_1=indices) == "FlashMLA"


@given(percent=st.integers(0, 100), tiles=st.integers(1, 40), empty=st.booleans())
def test_what_is_sampled_is_what_neighbours_share(percent: int, tiles: int, empty: bool) -> None:
    indices = sharing(tiles * module._TOKENS, 100, percent, 5000)
    # Rows without keys, as padding has them, say nothing.
    indices = torch.cat((indices, torch.full((11, 100), -1).int())) if empty else indices

    union, selected = counted(indices).tolist()
    tokens = module._TOKENS

    assert abs((1 - union / selected) * tokens / (tokens - 1) - percent / 100) < 0.01


def test_the_keys_of_a_tile_count_once() -> None:
    rows = [[5, 3, -1], [3, 9, 5], [1, -1, -1], [-1, -1, -1], [4, 2, 6]]

    assert counted(torch.tensor(rows, dtype=torch.int32)).tolist() == [4, 6], "of whole tiles"


def test_no_call_waits_for_its_sample(backend: Backend) -> None:
    Event.reached = False
    serve(backend, 20)
    assert OVERLAP.percent is None

    Event.reached = True
    serve(backend, 20)
    assert OVERLAP.percent == 100


def test_one_call_in_a_thousand_is_sampled(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALLS", 1009)
    of = sharing(ROWS, TOPK, 80, SLOTS)
    for _ in range(1008):
        OVERLAP.look(backend, of)
    assert OVERLAP._counted is None

    OVERLAP.look(backend, of)
    assert OVERLAP._counted is not None


def test_other_prompts_count_as_soon_as_the_old_samples_are_gone(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "say_once", lambda _, text: said.append(text))
    serve(backend, 2 * module._KEPT)
    assert OVERLAP.percent == 100

    serve(backend, module._KEPT + 1, percent=0)
    assert OVERLAP.percent == 0
    assert "100 %" in said[0] and " 0 %" in said[-1] and len(said) == 1 + module._KEPT
    assert said[-1] in (last_start.kept(KEPT_AS) or ""), "for the doctor"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PREFILL, True),
        (a_pass(Mode.EXTEND, 1000, 3, 9), True),
        (a_pass(Mode.EXTEND, *[8] * 100), False),
        (a_pass(Mode.DECODE, 4000), False),
        (None, False),
        (SimpleNamespace(forward_mode=None), False),
    ],
)
def test_only_prefills_of_many_tokens_a_sequence_have_neighbours(
    backend: Backend, given: Any, expected: bool
) -> None:
    """Queries of different sequences share nothing, in a decode say."""
    OVERLAP.begin(backend, given)
    OVERLAP.begin(Backend(), None if expected else PREFILL)

    serve(backend)

    assert (OVERLAP.percent is not None) is expected


def test_calls_of_flashattention_are_sampled_too(backend: Backend) -> None:
    for _ in range(module._FEWEST + 1):
        table = sharing(ROWS, TOPK, 50, SLOTS)
        assert backend._forward_fa3(page_table=table) == "FlashAttention-3"

    assert OVERLAP.percent == 50


def test_graphs_small_calls_and_other_tensors_are_not_sampled(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(backend, rows=7)
    backend._forward_flashmla_sparse(page_table_1=None)
    backend._forward_flashmla_sparse(page_table_1=sharing(ROWS, 2 * TOPK, 9, SLOTS)[:, ::2])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    serve(backend)

    assert OVERLAP._counted is None and OVERLAP.percent is None


def test_a_paused_plug_in_and_another_backend_sample_nothing(backend: Backend) -> None:
    serve(Backend())
    switch.pause()
    OVERLAP.begin(backend, PREFILL)
    serve(backend)

    assert OVERLAP.percent is None


def test_after_an_error_nothing_is_sampled(backend: Backend) -> None:
    assert backend._forward_flashmla_sparse(page_table_1=3) == "FlashMLA"

    serve(backend)
    assert OVERLAP.percent is None


def test_a_draft_and_other_attention_leave_it_as_it_was(backend: Backend) -> None:
    for draft, other in ((True, Backend()), (False, object())):
        module.start(SimpleNamespace(is_draft_worker=draft, attn_backend=other))

    serve(backend)
    assert OVERLAP.percent == 100
    assert Overlap().percent is None
