"""The indexer's hook around the engine's own context lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.indexer import Indexer, around_context_lens
from tests.engines.sglang.engine import Engine
from tests.engines.sglang.wheels import Wheel

_METHOD = "_build_paged_mqa_schedule_2d_ctx_lens"


class Captured:
    """A dispatcher that pairs batches of at least `least`, and counts how often it is asked."""

    def __init__(self, least: int = 0, layout: str = "native") -> None:
        self.asked: list[tuple[int, int]] = []
        self._least = least
        self._layout = layout

    def captured(self, batch_size: int, next_n: int) -> Any:
        """The one plan for graphs of that size."""
        self.asked.append((batch_size, next_n))
        chosen = self._layout if batch_size >= self._least else "flatten"
        return SimpleNamespace(indexer_layout=chosen)


@pytest.fixture
def engine(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine.of(wheel, monkeypatch)


def _lens(engine: Engine, backend: Any, lens: list[int], mode: str = "TARGET_VERIFY") -> Any:
    """What the engine hands to the indexer's schedule."""
    seqlens = torch.tensor(lens, dtype=torch.int32)
    next_n = backend.speculative_num_draft_tokens
    expanded = torch.cat([torch.arange(n - next_n + 1, n + 1, dtype=torch.int32) for n in lens])
    return getattr(backend, _METHOD)(engine.modes[mode], seqlens, expanded, len(lens))


def _steered(engine: Engine, asked: Any, next_n: int = 2) -> Any:
    kind = engine.hooked({_METHOD: around_context_lens})
    backend = engine.backend(kind, speculative_num_draft_tokens=next_n)
    Indexer.attach(backend, asked)
    return backend


@pytest.mark.parametrize("layout", ["native", "pairs"])
def test_on_hopper_a_pair_gets_the_shape_that_blackwell_gets(engine: Engine, layout: str) -> None:
    steered = _steered(engine, Captured(layout=layout))
    plain = engine.backend(speculative_num_draft_tokens=2)
    lens = [70, 9000, 3]

    ours = _lens(engine, steered, lens)
    assert _lens(engine, plain, lens).shape == (6, 1)
    engine.state.sm = 100
    theirs = _lens(engine, plain, lens)

    assert ours.is_contiguous()
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("flatten", "TARGET_VERIFY"), ("native", "DECODE"), ("native", "DRAFT_EXTEND_V2")],
)
def test_flattened_rows_and_other_passes_are_the_engines_own(
    engine: Engine, layout: str, mode: str
) -> None:
    captured = Captured(layout=layout)
    steered = _steered(engine, captured)
    plain, lens = engine.backend(speculative_num_draft_tokens=2), [70, 9000]

    assert torch.equal(_lens(engine, steered, lens, mode), _lens(engine, plain, lens, mode))
    assert bool(captured.asked) == (mode == "TARGET_VERIFY")


def test_a_batch_size_keeps_its_answer(engine: Engine) -> None:
    """A graph that was captured with a shape must be replayed with it, come what may."""
    captured = Captured(least=2)
    steered = _steered(engine, captured)
    first = [_lens(engine, steered, lens).shape for lens in ([70], [70, 80])]

    def broken(batch_size: int, next_n: int) -> Any:
        raise RuntimeError(f"no answer for {batch_size} and {next_n}")

    captured.captured = broken  # type: ignore[method-assign]
    again = [_lens(engine, steered, lens).shape for lens in ([9000], [9000, 5])]

    assert first == again == [(2, 1), (2, 2)]
    assert captured.asked == [(1, 2), (2, 2)]
    assert _lens(engine, steered, [70, 80, 90]).shape == (6, 1)


def test_an_unsteered_backend_is_the_engines_own(engine: Engine) -> None:
    hooked = engine.backend(
        engine.hooked({_METHOD: around_context_lens}), speculative_num_draft_tokens=2
    )
    plain = engine.backend(speculative_num_draft_tokens=2)

    assert torch.equal(_lens(engine, hooked, [70]), _lens(engine, plain, [70]))
