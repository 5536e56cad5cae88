"""The hook around SGLang's own selection of keys: it finds the same, or leaves it alone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_tune.backend.kernels import sampled_topk as kernels
from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.backend.kernels.topk_transform import transform_reference
from nsa_tune.engines.sglang import eligible, switch
from nsa_tune.engines.sglang.kernels import topk as module
from nsa_tune.engines.sglang.kernels.swap import Timing, Wins
from nsa_tune.engines.sglang.kernels.topk import PAGED, SWAPS, TopkCall, around_topk
from tests.engines.sglang.kernels.topk_engine import TOPK, Engine, Prefill
from tests.engines.sglang.wheels import VERSIONS, wheel_of
from tests.engines.wheels import Unreachable

METHODS = ("PAGED", "RAGGED")
WINS = Wins([Timing((1, TOPK), 2.0, 1.0)], 0.03, beyond=True)
LONG = Prefill([(20, 5), (0, 40)])


class Answered:
    """nsa-tune's kernel: what it selects from, answered by torch."""

    def __init__(self) -> None:
        self.prepared: list[TopkCall] = []
        self.calls: list[torch.Tensor] = []
        self.fails = self.captures = False

    def __call__(self, call: TopkCall) -> Callable[[torch.Tensor], torch.Tensor]:
        self.prepared.append(call)
        return partial(self._selected, call)

    def _selected(self, call: TopkCall, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append(logits)
        if self.fails:
            raise RuntimeError("no such kernel")
        found = sampled_topk_reference(logits, call.lengths, call.topk, call.row_starts)
        return transform_reference(found, call.transform)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Answered:
    kernel = Answered()
    monkeypatch.setattr(module, "selection_of", kernel)
    monkeypatch.setattr(module, "is_captured", lambda: kernel.captures)
    return kernel


@pytest.fixture(params=VERSIONS[1:])
def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, answered: Answered
) -> Iterator[Engine]:
    """Each release whose selection is hooked, with nsa-tune's kernel always the faster."""
    try:
        found = Engine(wheel_of(request.param), monkeypatch)
    except Unreachable as reason:
        pytest.skip(f"the wheel of SGLang {request.param} cannot be had: {reason}")
    for swap in SWAPS.values():
        swap.wins, swap.owner = WINS, found.backend
    yield found
    for swap in SWAPS.values():
        swap.forget()
    switch.resume()


def both(engine: Engine, metadata: Any, passed: dict[str, Any]) -> tuple[Any, Any]:
    """What SGLang selects by itself, and with the plug-in, each row's in order."""
    switch.pause()
    own = metadata.topk_transform(**passed)
    switch.resume()
    return own.sort(1).values, metadata.topk_transform(**passed).sort(1).values


LENS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=5).filter(
    lambda lens: sum(new for _, new in lens) > 0
)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lens=LENS, seed=st.integers(0, 9))
def test_a_prefill_gets_what_sglang_selects(
    engine: Engine, answered: Answered, method: str, lens: list[tuple[int, int]], seed: int
) -> None:
    prefill = Prefill(lens, seed)
    metadata = engine.metadata(prefill, method)
    answered.calls.clear()

    own, found = both(engine, metadata, prefill.whole())

    assert torch.equal(own, found)
    assert len(answered.calls) == (prefill.max_kv > TOPK)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lens=LENS, data=st.data())
def test_a_chunk_of_rows_gets_what_sglang_selects(
    engine: Engine,
    answered: Answered,
    method: str,
    lens: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    prefill = Prefill(lens)
    start = data.draw(st.integers(0, len(prefill.logits) - 1))
    end = data.draw(st.integers(start + 1, len(prefill.logits)))
    passed = prefill.chunk(start, end, ragged=method == "RAGGED")
    answered.calls.clear()

    own, found = both(engine, engine.metadata(prefill, method), passed)

    assert torch.equal(own, found)
    assert len(answered.calls) == (prefill.max_kv > TOPK)


def test_short_sequences_are_left_to_sglang(engine: Engine, answered: Answered) -> None:
    prefill = Prefill([(0, TOPK), (3, 4)])

    engine.metadata(prefill, "PAGED").topk_transform(**prefill.whole())

    assert not answered.calls


def test_sizes_at_which_it_is_not_faster_are_left_to_sglang(
    engine: Engine, answered: Answered
) -> None:
    PAGED.wins = Wins([Timing((1, TOPK), 1.0, 1.0)], 0.03, beyond=True)

    engine.metadata(LONG, "PAGED").topk_transform(**LONG.whole())

    assert not answered.calls


def test_a_step_of_decoding_is_left_to_sglang(engine: Engine, answered: Answered) -> None:
    asked: list[Any] = []
    inner = around_topk

    inner(lambda *given, **named: asked.append(named), engine.backend, row_starts=None, logits=1)
    inner(lambda *given, **named: asked.append(given), engine.backend, 1, row_starts=2)

    assert asked == [{"row_starts": None, "logits": 1}, (engine.backend, 1)]
    assert not answered.calls


@pytest.mark.parametrize(
    "changes",
    [
        {"force_unfused_topk": True},
        {"lengths": LONG.lengths.long()},
        {"lengths": LONG.lengths[:-1]},
        {"row_starts": LONG.starts[:-1]},
        {"logits": LONG.logits.half()},
        {"logits": torch.empty(LONG.logits.shape[::-1]).T},
        {"cu_seqlens_q_topk": None},
        {"cu_seqlens_q_topk": torch.zeros(2, dtype=torch.int32)},
        # With context parallelism it is a list of sequences, not of rows.
        {"batch_idx_list": [0, 1]},
        {"batch_idx_list": torch.zeros(len(LONG.logits), dtype=torch.int64)},
    ],
)
def test_what_the_kernel_does_not_take_is_left_to_sglang(
    engine: Engine, answered: Answered, changes: dict[str, Any]
) -> None:
    named = {
        "logits": LONG.logits,
        "lengths": LONG.lengths,
        "topk": TOPK,
        "topk_transform_method": engine.methods.PAGED,
        "attn_metadata": LONG.metadata(),
        "cu_seqlens_q_topk": LONG.metadata().cu_seqlens_q,
        "topk_indices_offset": None,
        "row_starts": LONG.starts,
        "batch_idx_list": None,
        "force_unfused_topk": False,
    }

    found = [
        around_topk(lambda *given, **named: "its own", engine.backend, **given)
        for given in (named, named | changes)
    ]

    assert isinstance(found[0], torch.Tensor) and found[1] == "its own"
    assert len(answered.calls) == 1


@pytest.mark.parametrize("page_size", [0, 48])
def test_pages_of_other_sizes_are_left_to_sglang(
    engine: Engine, answered: Answered, page_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metadata = engine.metadata(LONG, "PAGED")
    metadata.attn_metadata.page_size = page_size

    own, found = both(engine, metadata, LONG.whole())

    assert torch.equal(own, found) and not answered.calls
    assert "nsa-tune's kernel cannot take this prefill" in caplog.text


def test_the_switch_is_read_in_each_pass(
    engine: Engine, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = engine.metadata(LONG, "PAGED")

    for value, calls in (("0", 0), ("1", 1), ("0", 1)):
        monkeypatch.setenv("NSA_TUNE_TOPK", value)
        metadata.topk_transform(**LONG.whole())
        assert len(answered.calls) == calls


def test_a_capture_is_left_to_sglang(engine: Engine, answered: Answered) -> None:
    metadata = engine.metadata(LONG, "PAGED")
    for answered.captures in (True, False, True):
        metadata.topk_transform(**LONG.whole())

    assert len(answered.calls) == 1


def test_what_layers_share_is_prepared_once_a_pass(engine: Engine, answered: Answered) -> None:
    other = Prefill([(20, 5), (0, 40)], seed=1)
    for prefill in (LONG, other):
        metadata = engine.metadata(prefill, "PAGED")
        for layer in range(3):
            passed = prefill.whole()
            passed["logits"] = passed["logits"].flip(1) * (layer + 1)

            own, found = both(engine, metadata, passed)

            assert torch.equal(own, found)

    assert len(answered.prepared) == 2 and len(answered.calls) == 6


@pytest.mark.parametrize("name", ["real_page_table", "max_seq_len_k"])
def test_metadata_that_is_refreshed_in_place_is_seen(
    engine: Engine, answered: Answered, name: str
) -> None:
    metadata = engine.metadata(LONG, "PAGED")
    metadata.topk_transform(**LONG.whole())
    changed = {"real_page_table": LONG.pages.flip(1), "max_seq_len_k": TOPK}[name]
    setattr(metadata.attn_metadata, name, changed)

    metadata.topk_transform(**LONG.whole())

    assert len(answered.prepared) + len(answered.calls) == (4 if name == "real_page_table" else 2)


def test_the_engines_metadata_is_not_kept(engine: Engine, answered: Answered) -> None:
    metadata = engine.metadata(LONG, "PAGED")
    metadata.topk_transform(**LONG.whole())
    kept = weakref.ref(metadata.attn_metadata)

    del metadata

    assert kept() is None


def test_a_failure_is_said_once_and_not_repeated(
    engine: Engine, answered: Answered, caplog: pytest.LogCaptureFixture
) -> None:
    answered.fails = True
    metadata = engine.metadata(LONG, "PAGED")

    own, found = both(engine, metadata, LONG.whole())
    metadata.topk_transform(**LONG.whole())

    assert torch.equal(own, found)
    assert len(answered.calls) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no such kernel" in caplog.text


def _exact(*given: Any) -> torch.Tensor:
    """nsa-tune's kernel, by torch."""
    scores, lengths, count, starts, _, transform = given
    return transform_reference(sampled_topk_reference(scores, lengths, count, starts), transform)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was compiled together, by how many scores are selected."""
    counts: list[int] = []
    monkeypatch.setattr(kernels, "compile_all", counts.append)
    return counts


def test_every_variant_of_the_kernel_is_checked(
    compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[kernels.Shape] = set()

    def noted(*given: Any) -> torch.Tensor:
        seen.add(given[4])
        return _exact(*given)

    monkeypatch.setattr(kernels, "sampled_topk", noted)

    module.check(2048, torch.device("cpu"))

    assert seen == set(kernels.shapes())
    assert compiled == [2048]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("row", [1, 4, 7])
def test_a_wrong_selection_is_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> torch.Tensor:
        chosen = _exact(*given)
        chosen[row, 0] += 1
        return chosen

    monkeypatch.setattr(kernels, "sampled_topk", wrong)

    with pytest.raises(RuntimeError, match="selects wrongly with Shape"):
        module.check(2048, torch.device("cpu"))


@pytest.mark.parametrize("method", METHODS)
def test_both_kernels_get_the_same_made_up_calls(
    engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    monkeypatch.setattr(module, "check", lambda topk, device: None)
    modules = SimpleNamespace(TopkTransformMethod=engine.methods)
    monkeypatch.setattr(module, "import_module", lambda name: modules)
    # Not all sizes fit: that leaves the small ones, which a CPU can select from.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (128 * 6144 * 16, 0))
    backend = SimpleNamespace(dsa_topk_backend=engine.backend, dsa_index_topk=2048)

    calls = list(module.selections(method, eligible.Engine(None, backend)))

    assert [call.size for call in calls] == [
        (64, 3072), (64, 12288), (256, 3072),
    ]  # fmt: skip
    for call in calls[:2]:
        engines, swapped = (way().sort(1).values for way in (call.engine, call.swapped))
        # Random numbers: few rows, if any, have equal ones where the selection ends.
        assert (engines != swapped).any(1).sum() <= 2
