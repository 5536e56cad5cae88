"""What a captured graph runs in place of SGLang's attention and selection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import (
    Query,
    Swap,
    around_extend,
    around_k_only,
    swapped,
)


class _Backend:
    def get_indexer_metadata(self, layer_id: int, forward_batch: object) -> str:
        return "SGLang's own"


def _own(backend: object, *rest: object, **named: object) -> str:
    return "SGLang's own"


def _attended(query: Query) -> Query:
    return query


def _extended(backend: object, **named: Any) -> Any:
    return around_extend(_own, backend, "q", "k", "v", "layer", "batch", **named)


def test_within_a_capture_its_attention_gets_the_call() -> None:
    backend = _Backend()
    with swapped(Swap(backend, _attended)):
        query = _extended(backend, q_rope="q_rope", k_rope="k_rope", topk_indices="indices")

    assert query == Query("q", "q_rope", "k", "k_rope", "indices", "layer", "batch")


def test_otherwise_attention_is_sglangs_own() -> None:
    backend = _Backend()
    assert _extended(backend, q_rope=4) == "SGLang's own"
    with swapped(Swap(_Backend(), _attended)):  # of another backend
        assert _extended(backend, q_rope=4) == "SGLang's own"


def _k_only(indexer: object, x: object, return_indices: bool = True) -> bool:
    return return_indices


def test_where_attention_is_dense_the_indexer_only_stores_its_keys() -> None:
    assert around_k_only(_k_only, "indexer", "x") is True
    assert around_k_only(_k_only, "indexer", "x", return_indices=False) is False
    with swapped(Swap(_Backend(), _attended)):
        assert around_k_only(_k_only, "indexer", "x") is False
        assert around_k_only(_k_only, "indexer", "x", return_indices=True) is False
    assert around_k_only(_k_only, "indexer", "x") is True


def test_where_it_is_sparse_the_indexer_selects_by_the_graphs_metadata() -> None:
    backend: Any = _Backend()
    metadata = SimpleNamespace()
    with swapped(Swap(backend, _attended, metadata)):
        assert backend.get_indexer_metadata(3, "batch") is metadata
        assert around_k_only(_k_only, "indexer", "x") is True
    assert backend.get_indexer_metadata(3, "batch") == "SGLang's own"


@pytest.mark.parametrize("metadata", [None, SimpleNamespace()])
def test_an_error_leaves_everything_as_it_was(metadata: Any) -> None:
    backend = _Backend()
    with pytest.raises(RuntimeError), swapped(Swap(backend, _attended, metadata)):
        raise RuntimeError("made up")

    assert vars(backend) == {}
    assert _extended(backend) == "SGLang's own"
    assert around_k_only(_k_only, "indexer", "x") is True
