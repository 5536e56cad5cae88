"""How much of a selection queries keep is read from the selections that an engine attends by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nsa_tune.backend.points.selections import Selection, selected_keys
from nsa_tune.engines.shared_keys import SharedKeys

TOPK, PREFIX, NEW = 256, 4096, 600


def _seen(overlap: float | None, passes: int = 3) -> SharedKeys:
    """What is known after prefills of two sequences, of which the second is the longer one."""
    kept = SharedKeys(TOPK)
    for seed in range(passes):
        kept.begin([0, PREFIX], [40, NEW])
        seen = PREFIX + 1 + torch.arange(NEW)
        if overlap is None:
            torch.manual_seed(seed)
            keys = torch.rand(NEW, PREFIX).argsort(dim=1)[:, :TOPK]
        else:
            first = torch.zeros(NEW, dtype=torch.int64)
            keys = selected_keys(Selection.sharing(overlap), seen, first, TOPK, seed)
        some = torch.cat((torch.full((40, TOPK), -1), keys)).int()
        for _ in range(20):
            kept.look(some)
    for _ in range(4):
        kept.begin([0], [1])
    return kept


@pytest.mark.parametrize("overlap", [0.5, 0.8, 0.95])
def test_what_queries_share_beyond_chance_is_found(overlap: float) -> None:
    chance = TOPK / (PREFIX + NEW / 2)
    assert _seen(overlap).share == pytest.approx((overlap - chance) / (1 - chance), abs=0.03)


def test_keys_that_are_shared_by_chance_do_not_count() -> None:
    assert _seen(None).share == pytest.approx(0.0, abs=0.02)


def test_short_sequences_other_selections_and_no_pass_are_left_alone() -> None:
    kept = SharedKeys(TOPK)
    for indices in (None, torch.zeros(NEW, TOPK // 2).int(), torch.zeros(8, TOPK).int()):
        for prefix in (0, PREFIX):
            kept.begin([prefix] * 3, [60, NEW, 1])
            kept.look(indices)
    assert kept.share == 0


def test_what_queries_share_may_change_and_be_more_in_some_places() -> None:
    kept, same = SharedKeys(TOPK), torch.arange(TOPK).int().expand(NEW, -1)
    apart = torch.arange(NEW * TOPK).int().view(NEW, TOPK)
    halves = torch.cat((same[300:], apart[300:]))
    for indices, low, high in ((same, 1.0, 1.0), (halves, 0.3, 0.7), (apart, 0.0, 0.0)):
        for _ in range(16):
            kept.begin([PREFIX], [NEW])
            for _ in range(61):
                kept.look(indices)
        assert low <= kept.share <= high


def test_when_a_sample_is_read_follows_from_no_clock() -> None:
    """Else ranks would look at other rows, and take other kernels than each other."""
    waits = []
    shares = []
    for done in (False, True):
        kept = SharedKeys(TOPK)
        for _pass in range(12):
            kept.begin([PREFIX], [NEW])
            for _ in range(61):
                kept.look(torch.arange(TOPK).int().expand(NEW, -1))
            event = SimpleNamespace(
                query=lambda done=done: done, synchronize=lambda: waits.append(1)
            )
            kept._waiting = [(shared, event, keys) for shared, _, keys in kept._waiting]
            shares.append(kept.share)
    assert shares[:12] == shares[12:] == [0.0] * 2 + [1.0] * 10
    assert waits


def test_a_pass_that_did_not_begin_here_is_not_looked_at() -> None:
    """It runs as SGLang has it, or drafts tokens: the last prefill's rows are not in it."""
    kept = SharedKeys(TOPK)
    kept.begin([PREFIX], [NEW])
    kept.end()
    for _ in range(61):
        kept.look(torch.arange(TOPK).int().expand(NEW, -1))
    assert kept._waiting == []
