"""A batch's sequences: as they are, or as equal as its sums allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.points.sequences import equal_sequences, runs
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

V3, V4 = "deepseek-v3.2", "deepseek-v4"


def test_sequences_that_are_alike_are_counted() -> None:
    assert list(runs(Batch.extend([5, 5], [2, 2]))) == [(5, 2, 2)]
    assert list(runs(Batch.extend([5, 6], [2, 2]))) == [(5, 2, 1), (6, 2, 1)]


@given(prefix=st.integers(0, 1000), new=st.integers(1, 1000), count=st.integers(1, 50))
def test_equal_sequences_have_all_new_tokens_and_no_more(prefix: int, new: int, count: int) -> None:
    new += count
    found = equal_sequences(prefix, new, count)

    assert sum(many for _, _, many in found) == count
    assert sum(each * many for _, each, many in found) == new
    assert max(each for _, each, _ in found) - min(each for _, each, _ in found) <= 1
    assert all(many for _, _, many in found)


@given(count=st.integers(1, 30), each=st.integers(1, 200), more=st.integers(0, 29))
def test_sums_of_nearly_equal_sequences_tell_their_rows(count: int, each: int, more: int) -> None:
    """Where some have a token more than others."""
    longer = min(more, count - 1)
    batch = Batch.extend([5000] * count, [each] * (count - longer) + [each + 1] * longer)
    for model, point, name in (
        (V3, "indexer_prefill", "keys_of_the_busiest"),
        (V3, "indexer_topk", "selecting_rows"),
        (V4, "v4_prefill_c4", "steps"),
    ):
        layout = KVLayout.V4_PAGED if model == V4 else KVLayout.FP8_PACKED
        features = Features(
            POINTS[point], Setting(profile_of(model), 128, layout, KNOWN["NVIDIA H200"])
        )
        assert features.by_name(batch.sums)[name] == features.by_name(batch)[name]
