"""Buffers of captured graphs in SGLang's custom all-reduce: counted, and taken back."""

from __future__ import annotations

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from nsa_tune.engines.sglang.pass_mode.whole_pass.graph_buffers import GROUPS, GraphBuffers
from tests.engines.sglang.wheels import Wheel

if TYPE_CHECKING:
    import pytest

_STATE = "sglang.srt.distributed.parallel_state"
_COMMUNICATORS = "sglang/srt/distributed/device_communicators"


class _Newer:
    """CustomAllReduceV2."""

    disabled = False

    def __init__(self, noted: int) -> None:
        self._graph_inputs = [(address, 16) for address in range(noted)]


class _Older:
    """CustomAllreduce, whose notes are its library's."""

    disabled = False

    def __init__(self, noted: int) -> None:
        self._ptr = noted


ops = SimpleNamespace(get_graph_buffer_ipc_meta=lambda address: ([0] * 64, [0] * address))
"""As the module of the older communicator has it."""


def _engine(monkeypatch: pytest.MonkeyPatch, **groups: Any) -> GraphBuffers:
    state = ModuleType(_STATE)
    for name, communicator in groups.items():
        setattr(state, name, SimpleNamespace(ca_comm=communicator))
    monkeypatch.setitem(sys.modules, _STATE, state)
    return GraphBuffers.of_engine()


def test_each_communicator_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, off = _Newer(3), _Newer(9)
    off.disabled = True
    noted = _engine(monkeypatch, _TP=shared, _ATTN_TP=shared, _MOE_TP=off, _PP=None, _DCP=_Older(5))

    assert noted.fingerprint() == "[3, 5]"


def test_a_communicator_of_another_kind_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(disabled=False)

    assert _engine(monkeypatch, _TP=_Newer(1), _MOE_TP=other).fingerprint() is None


def test_what_was_noted_since_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _Newer(3), _Newer(0)
    noted = _engine(monkeypatch, _TP=first, _DCP=_Older(5), _MOE_TP=second)
    marks = noted.snapshot()
    first._graph_inputs += [(50, 16)] * 4
    second._graph_inputs += [(60, 16)]
    noted.rollback(marks)

    assert [address for address, _ in first._graph_inputs] == [0, 1, 2]
    assert second._graph_inputs == []


def test_an_engine_without_groups_has_nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _engine(monkeypatch).fingerprint() == "[]"


def test_the_groups_are_those_that_sglang_captures(wheel: Wheel) -> None:
    """All but the first two are in a tuple of variables."""
    file = "sglang/srt/distributed/parallel_state.py"
    definition = wheel.definition(file, "graph_capture")
    capture = ast.unparse(definition)
    (loop,) = [node for node in ast.walk(definition) if isinstance(node, ast.For)]
    assert isinstance(loop.iter, ast.Tuple)
    within = {ast.unparse(one) for one in loop.iter.elts}

    assert "get_tp_group().graph_capture(" in capture
    assert "get_pp_group().graph_capture(" in capture
    assert {"_TP", "_PP", *within} <= set(GROUPS)
    assert "maybe_ca_context = nullcontext() if ca_comm is None else ca_comm.capture()" in (
        ast.unparse(wheel.definition(file, "GroupCoordinator.graph_capture"))
    )


def test_notes_are_where_they_are_looked_for(wheel: Wheel) -> None:
    newer = f"{_COMMUNICATORS}/custom_all_reduce_v2.py"
    row = ast.unparse(wheel.definition(newer, "CustomAllReduceV2._allocate_graph_row"))
    assert "index = self._graph_counter + len(self._graph_inputs)" in row
    assert "self._graph_inputs.append((input.data_ptr(), nbytes))" in row

    older = f"{_COMMUNICATORS}/custom_all_reduce.py"
    register = ast.unparse(wheel.definition(older, "CustomAllreduce.register_graph_buffers"))
    assert "ops.get_graph_buffer_ipc_meta(self._ptr)" in register
    assert "custom_all_reduce_ops as ops" in wheel.text(older)
