"""Hooks around what a layer calls are on for captures, and served passes have those that swap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.plugin import HOOKS_IN_PLACE, Hook, wrapped
from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.kernels import layer_hooks
from nsa_tune.engines.sglang.kernels.copies import PADDING
from nsa_tune.engines.sglang.kernels.swap import Timing, Wins
from nsa_tune.engines.sglang.kernels.topk import PAGED
from nsa_tune.engines.sglang.pass_mode.hooks import around_capture_decode

NAMES = ("extend", "k_only", "fa3", "topk", "sparse")


class _Engine:
    """A class of the engine's; each of its methods is hooked."""


def _own(engine: object) -> str:
    return "the engine's"


def _around(original: Callable[..., Any], engine: object) -> str:
    return f"hooked, {original(engine)}"


def _on() -> set[str]:
    """Names of the methods that are called through their hooks."""
    return {name for name in NAMES if getattr(_Engine(), name)().startswith("hooked")}


def _hook(owner: Any, name: str, original: Callable[..., Any]) -> Hook:
    hook = Hook(owner, name, original, wrapped(original, _around))
    setattr(owner, name, hook.hooked)
    return hook


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setitem(HOOKS_IN_PLACE, name, _hook(_Engine, name, _own))
    layer_hooks.put_on()
    yield
    switch.resume()
    layer_hooks.put_on()
    for swap in (PADDING, PAGED):
        swap.forget()


def test_captures_have_all_and_served_passes_those_of_kernels_that_are_taken() -> None:
    assert _on() == set(NAMES)
    PAGED.wins = Wins([Timing((64, 3072), 2.0, 1.0)], 0.03, beyond=True)
    PADDING.wins = Wins([Timing((64,), 1.0, 2.0)], 0.02, beyond=True)  # slower everywhere
    layer_hooks.serve()
    assert _on() == {"topk"}
    assert around_capture_decode(lambda graphs: _on(), SimpleNamespace()) == set(NAMES)
    assert _on() == {"topk"}


def test_a_paused_plug_in_has_none_until_it_is_resumed() -> None:
    PADDING.wins = Wins([Timing((64,), 2.0, 1.0)], 0.02, beyond=True)
    layer_hooks.serve()
    switch.pause()
    assert _on() == set()
    assert HOOKS_IN_PLACE["sparse"].is_off

    switch.resume()
    assert _on() == {"sparse"}
    layer_hooks.put_on()
    switch.pause()
    assert _on() == set(NAMES), "something is captured"


def test_a_hook_that_another_plug_in_has_wrapped_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = wrapped(_Engine.topk, _around)  # type: ignore[attr-defined]
    monkeypatch.setattr(_Engine, "topk", theirs)
    layer_hooks.serve()
    assert _Engine().topk() == "hooked, hooked, the engine's"  # type: ignore[attr-defined]
    assert not HOOKS_IN_PLACE["topk"].is_off


def test_a_function_is_left_wherever_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    its, other = ModuleType("made_up_module"), ModuleType("made_up_importer")
    hook = _hook(its, "function", _own)
    vars(other)["function"] = vars(its)["function"]
    for module in (its, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # A lazy one fails when it is looked at, since what it would load is missing.
    lazy = type("Lazy", (ModuleType,), {"__getattribute__": _own})
    monkeypatch.setitem(sys.modules, "made_up_lazy", lazy("made_up_lazy"))

    hook.take_off()
    assert vars(its)["function"] is vars(other)["function"] is _own
    hook.put_on()
    assert vars(its)["function"] is vars(other)["function"] is hook.hooked
