"""The kernel over unions: which calls it takes, and by which samples."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend import libraries
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.backend.libraries.sglang import calls
from nsa_tune.engines.hooking import wrapped
from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.eligible import Engine
from nsa_tune.engines.sglang.kernel_swap import Timing, Wins
from nsa_tune.engines.sglang.kernels import copies
from nsa_tune.engines.sglang.kernels import grouped as module
from nsa_tune.engines.sglang.kernels.grouped import (
    GROUPED,
    OVERLAP,
    Overlap,
    around_fa3,
    around_sparse,
    counted,
    sharing,
    sparse_calls,
    takes,
)

CPU = torch.device("cpu")
HEADS, RANK, ROPE, TOPK, SLOTS, ROWS = 8, 32, 16, 16, 200, 24


def over_unions(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, rank: int,
    lengths: torch.Tensor, union: int,
) -> torch.Tensor:  # fmt: skip
    """In place of SGLang's."""
    assert len(lengths) == len(q) and union == module._TOKENS and rank == RANK
    return sparse_mla_reference(q, latents, indices, scale, rank)


class Event:
    """An event that the device reaches when a test says so."""

    reached = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.reached


class Backend:
    num_q_heads, dsa_index_topk, dsa_kv_cache_store_fp8 = HEADS, TOPK, False

    def _forward_flashmla_sparse(self, **named: Any) -> Any:
        return sparse_mla_reference(
            named["q_all"], named["kv_cache"][:, 0], named["page_table_1"], named["sm_scale"], RANK
        )

    def _forward_fa3(self, **named: Any) -> str:
        return "FlashAttention-3"


Backend._forward_flashmla_sparse = wrapped(  # type: ignore[method-assign]
    Backend._forward_flashmla_sparse, around_sparse
)
Backend._forward_fa3 = wrapped(Backend._forward_fa3, around_fa3)  # type: ignore[method-assign]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A backend for which the kernel over unions was faster from 80 % on, and whose calls are
    sampled from the first on."""
    monkeypatch.setattr(calls, "triton_sparse", over_unions)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_ROWS", (8,))
    monkeypatch.setattr(module, "_CALLS", 1)
    monkeypatch.setattr(OVERLAP, "_event", Event)
    monkeypatch.setattr(OVERLAP, "prefills", True)
    made = Backend()
    times = {0: 30.0, 50: 12.0, 80: 8.0, 95: 5.0}
    timings = [Timing((rows, at), 10.0, us) for rows in (8, 64) for at, us in times.items()]
    GROUPED.wins, GROUPED.owner = Wins(timings, GROUPED.margin, beyond=True), made
    Event.reached = True
    OVERLAP.forget()
    yield made
    GROUPED.forget()
    OVERLAP.forget()
    switch.resume()


def call(percent: int = 100, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """What SGLang passes to `_forward_flashmla_sparse`, small."""
    generator = torch.Generator().manual_seed(rows)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "q_all": values(rows, HEADS, RANK + ROPE), "kv_cache": values(SLOTS, 1, RANK + ROPE),
        "v_head_dim": RANK, "page_table_1": sharing(rows, TOPK, percent, SLOTS, CPU),
        "sm_scale": 0.1, "topk_length": torch.full((rows,), TOPK, dtype=torch.int32),
    } | changes  # fmt: skip


def serve(backend: Backend, count: int = 9, **given: Any) -> Any:
    """The output of the last of some calls; the first ones are sampled."""
    for _ in range(count):
        out = backend._forward_flashmla_sparse(**call(**given))
    return out


@given(percent=st.integers(0, 100), tiles=st.integers(1, 40), empty=st.booleans())
def test_what_is_sampled_is_what_neighbours_share(percent: int, tiles: int, empty: bool) -> None:
    overlap = Overlap(Event)
    indices = sharing(tiles * module._TOKENS, 100, percent, 5000, CPU)
    # Rows without keys, as padding has them, say nothing.
    indices = torch.cat((indices, torch.full((11, 100), -1).int())) if empty else indices

    for _ in range(10 * module._CALLS):
        overlap.look(indices)

    assert overlap.percent is not None and abs(overlap.percent - percent) <= 1


def test_the_keys_of_a_tile_count_once() -> None:
    rows = [[5, 3, -1], [3, 9, 5], [1, -1, -1], [-1, -1, -1], [4, 2, 6]]

    assert counted(torch.tensor(rows, dtype=torch.int32)).tolist() == [4, 6], "of whole tiles"


def test_no_call_waits_for_its_sample(backend: Backend) -> None:
    Event.reached = False
    serve(backend, 20)
    assert OVERLAP.percent is None and not takes(backend, ROWS)

    Event.reached = True
    serve(backend, 20)
    assert OVERLAP.percent == 100 and takes(backend, ROWS)


def test_other_prompts_count_as_soon_as_the_old_samples_are_gone(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "say_once", lambda _, text: said.append(text))
    serve(backend, 2 * module._KEPT)
    assert takes(backend, ROWS)

    serve(backend, module._KEPT + 1, percent=0)
    assert OVERLAP.percent == 0 and not takes(backend, ROWS)
    assert "100 %" in said[0] and "0 %" in said[-1] and len(said) == 1 + module._KEPT


def test_without_enough_samples_flashmla_runs(backend: Backend) -> None:
    before = OVERLAP.taken

    serve(backend, module._FEWEST)
    assert OVERLAP.taken == before

    serve(backend, 1)
    assert OVERLAP.taken == before + 1


@pytest.mark.parametrize(("percent", "taken"), [(0, 0), (60, 0), (75, 0), (81, 1), (100, 1)])
def test_where_neighbours_share_as_much_as_it_needs_it_takes_the_call(
    backend: Backend, percent: int, taken: int
) -> None:
    before = OVERLAP.taken

    serve(backend, module._FEWEST, percent=percent, rows=48)
    named = call(percent, 48)
    out = backend._forward_flashmla_sparse(**named)

    wanted = Backend._forward_flashmla_sparse.__wrapped__(backend, **named)  # type: ignore[attr-defined]
    assert OVERLAP.taken - before == taken
    assert float((out.float() - wanted.float()).norm() / wanted.float().norm()) < 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_sink": torch.zeros(HEADS)},
        {"topk_length": None},
        {"q_all": torch.zeros(ROWS, 2 * HEADS, RANK + ROPE, dtype=torch.bfloat16)},
        {"page_table_1": sharing(ROWS, TOPK, 100, SLOTS, CPU).long()},
        {"page_table_1": sharing(ROWS, 2 * TOPK, 100, SLOTS, CPU)[:, ::2]},
    ],
)
def test_other_calls_are_flashmlas(backend: Backend, changes: dict[str, Any]) -> None:
    serve(backend)
    before = OVERLAP.taken

    backend._forward_flashmla_sparse(**call() | changes)
    backend._forward_flashmla_sparse(**call(rows=7))

    assert OVERLAP.taken == before


class Mode(Enum):
    EXTEND, DECODE = 1, 2


def a_pass(mode: Mode, *lens: int) -> Any:
    return SimpleNamespace(
        forward_mode=mode, tbo_children=None, tbo_parent_token_range=None,
        extend_seq_lens_cpu=list(lens),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (a_pass(Mode.EXTEND, 4000), True),
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
    serve(backend)
    before = OVERLAP.taken

    module.begin(Backend(), None)
    assert OVERLAP.prefills, "of another backend"
    module.begin(backend, given)

    serve(backend, 1)
    assert (OVERLAP.taken > before) is takes(backend, ROWS) is expected


def test_a_graph_that_is_captured_keeps_flashmla(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(backend)
    before = OVERLAP.taken
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    serve(backend)

    assert OVERLAP.taken == before


def test_a_paused_plug_in_and_another_backend_neither_sample_nor_take(backend: Backend) -> None:
    serve(Backend())
    switch.pause()
    serve(backend)

    assert OVERLAP.percent is None


def test_after_an_error_flashmla_runs_for_good(backend: Backend) -> None:
    serve(backend)

    out = backend._forward_flashmla_sparse(**call(v_head_dim=None))

    assert isinstance(out, torch.Tensor)
    assert GROUPED.wins is None


def test_calls_of_flashattention_are_sampled_too(backend: Backend) -> None:
    for _ in range(module._FEWEST + 1):
        table = sharing(ROWS, TOPK, 90, SLOTS, CPU)
        assert backend._forward_fa3(page_table=table) == "FlashAttention-3"

    assert takes(backend, ROWS)


@pytest.mark.parametrize(("heads", "there", "applies"), [(8, 1, 1), (16, 1, 0), (8, 0, 0)])
def test_it_is_compared_for_8_heads_where_sglang_has_it(
    monkeypatch: pytest.MonkeyPatch, heads: int, there: int, applies: int
) -> None:
    monkeypatch.setattr(libraries, "answering", lambda name: object() if there else None)
    backend = SimpleNamespace(num_q_heads=heads)

    assert GROUPED.applies(Engine(None, backend)) == bool(applies)


def test_a_start_compares_it_at_each_share(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    for name, value in (("RANK", RANK), ("ROPE", ROPE)):
        monkeypatch.setattr(copies, name, value)
    monkeypatch.setattr(module, "_KEYS", SLOTS)
    monkeypatch.setattr(module, "_ROWS", (8, 16, 32))
    OVERLAP._shares.append(1.0)
    arguments = SimpleNamespace(chunked_prefill_size=16)
    runner = SimpleNamespace(max_total_num_tokens=5000, server_args=arguments)

    made_up = list(sparse_calls(Engine(runner, backend)))

    assert [made.size for made in made_up] == [*product((8, 16), module._PERCENT)]
    for made in made_up:
        GROUPED._compare(made, GROUPED.tolerance or 0.0)
    assert not OVERLAP._shares, "of the engine before"
