"""What a rank says travels in SGLang's own gathering, and changes nothing that SGLang reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks.gathered import (
    MOST_SEQUENCES,
    Gathered,
    Said,
    around_gather,
    saying,
)

_WAYS = (PassMode.DECODE_GRAPH, PassMode.DENSE_GRAPH, PassMode.DENSE_MLA_GRAPH)


@given(
    st.builds(
        Said,
        st.integers(0, 2**36),
        st.integers(0, MOST_SEQUENCES),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.frozensets(st.sampled_from(_WAYS)),
    )
)
def test_what_is_said_is_read_again(said: Said) -> None:
    assert Said.decoded(said.encoded()) == said
    assert 2 <= said.encoded() < 2**63


@pytest.mark.parametrize("value", [0, 1, -1])
def test_what_sglang_writes_itself_says_nothing(value: int) -> None:
    assert Said.decoded(value) is None


class _Info:
    """SGLang's MLPSyncBatchInfo of one rank; the others' rows are given."""

    def __init__(self, others: list[int], *, tbo: bool = False, on_host: bool = False) -> None:
        self.local_can_run_tbo: int = tbo
        self._others = others
        self._on_host = on_host

    def all_gather(self, device: str, group: object, use_all_reduce: bool = False) -> str:
        rows = [[7, 1, 0, 1, int(one), 1, 1] for one in (self.local_can_run_tbo, *self._others)]
        setattr(self, "tp0_info_cpu" if self._on_host else "tp0_info", torch.tensor(rows))
        self.global_num_tokens: Any = [7] * len(rows)
        self.is_extend_in_batch = self.can_run_prefill_cuda_graph = True
        return "gathered"


def _gathered(info: _Info, said: Said | None) -> Any:
    with saying(said):
        assert around_gather(type(info).all_gather, info, "cpu", None) == "gathered"
    return info.global_num_tokens


@pytest.mark.parametrize("on_host", [False, True])
def test_what_all_say_goes_with_their_tokens(on_host: bool) -> None:
    other = Said(500, 3, short=True, lost=frozenset({PassMode.DENSE_GRAPH}))
    found = _gathered(_Info([other.encoded()], on_host=on_host), Said(30))

    assert found == [7, 7]
    assert isinstance(found, Gathered)
    assert found.said == (Said(30), other)
    assert found.prefill
    assert found.graph


@pytest.mark.parametrize("silent", [0, 1])
def test_one_rank_that_says_nothing_silences_all(silent: int) -> None:
    found = _gathered(_Info([Said(5).encoded(), silent]), Said(30))

    assert type(found) is list


def test_a_rank_that_says_nothing_sends_what_sglang_sends() -> None:
    info = _Info([Said(5).encoded()])
    found = _gathered(info, None)

    assert info.local_can_run_tbo is False
    assert type(found) is list


def test_a_rank_that_nobody_hears_goes_by_what_the_others_say() -> None:
    """Of ranks that share a batch only the first one's row is read: this one is the second."""
    heard = [Said(5), Said(30)]

    class Second(_Info):
        def all_gather(self, device: str, group: object, use_all_reduce: bool = False) -> str:
            result = super().all_gather(device, group)
            own: Any = self
            own.tp0_info = own.tp0_info[1:]
            return result

    found = _gathered(Second([one.encoded() for one in heard]), None)

    assert isinstance(found, Gathered)
    assert found.said == tuple(heard)


def test_a_process_that_is_not_steered_goes_by_nothing() -> None:
    info = _Info([Said(5).encoded()])
    around_gather(_Info.all_gather, info, "cpu", None)

    assert type(info.global_num_tokens) is list


def test_a_field_in_use_is_left_alone() -> None:
    info = _Info([1], tbo=True)
    _gathered(info, Said(5))

    assert info.local_can_run_tbo is True


def test_nothing_is_said_after_an_error() -> None:
    def fails(info: object, *rest: object) -> None:
        raise RuntimeError("made up")

    with pytest.raises(RuntimeError), saying(Said(5)):
        around_gather(fails, SimpleNamespace(local_can_run_tbo=False))
    info = _Info([1])
    around_gather(_Info.all_gather, info, "cpu", None)

    assert info.local_can_run_tbo is False
