"""How kernels split selections: the formulas do what the kernels' own code does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.kernels import sparse_mla, split_sparse_mla
from nsa_tune.backend.points import POINTS, splits
from nsa_tune.backend.types.formula import evaluated
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of

DECODE = POINTS["decode"]
TOPK, SMS = 2048, 132
HEADS = (8, 16, 32, 64, 128)


def setting_of(heads: int, layout: KVLayout = KVLayout.BF16) -> Setting:
    return Setting(profile_of("deepseek-v3.2"), heads, layout, KNOWN["NVIDIA H200"])


def value_of(name: str, batch: Batch, heads: int) -> Any:
    return evaluated(DECODE.formulas(setting_of(heads)), name)(batch)


def features_of(
    batch: Batch, heads: int = 16, point: str = "decode", layout: KVLayout = KVLayout.BF16
) -> dict[str, float]:
    return Features(POINTS[point], setting_of(heads, layout)).by_name(batch)


def most_parts(rows: int, heads: int) -> int:
    """FlashAttention-3's `num_splits_heuristic` over the tiles of all rows: the fewest parts that
    fill the waves of tiles at least 0.85 times as well as the best number does."""
    if Fraction(rows * heads, 64) >= Fraction(8, 10) * SMS:
        return 1
    tiles = -(-rows * heads // 64)
    waves = {parts: Fraction(tiles * parts, SMS) for parts in range(1, TOPK // 64 + 1)}
    filled = {parts: one / ceil(one) for parts, one in waves.items()}
    enough = Fraction(85, 100) * max(filled.values())
    return min(parts for parts, one in filled.items() if one >= enough)


@pytest.mark.parametrize("heads", HEADS)
def test_fa3_splits_a_row_into_as_many_parts_as_its_heuristic_says(heads: int) -> None:
    found = splits.fa3_most_parts(setting_of(heads))

    rows = range(1, 1000)
    assert [found(one) for one in rows] == [most_parts(one, heads) for one in rows]


@pytest.mark.parametrize(("heads", "rows"), [(16, 423), (64, 106), (128, 53)])
def test_fa3_takes_rows_whole_where_their_tiles_nearly_fill_the_device(
    heads: int, rows: int
) -> None:
    found = splits.fa3_most_parts(setting_of(heads))

    assert found(rows - 1) > found(rows) == found(100 * rows) == 1


def test_fa3_leaves_parts_of_two_blocks_where_more_parts_fill_little_more() -> None:
    """A row of 32 blocks for itself: an even share is one, but 28 of 132 SMs are nearly as many as
    32 are."""
    row = Batch.decode([TOPK])

    assert (value_of("even_parts", row, 16), value_of("key_parts", row, 16)) == (32, 28)
    assert features_of(row)["blocks_of_the_busiest"] == 2


def blocks_of_the_busiest(keys: list[int], heads: int) -> int:
    """FlashAttention-3's scheduler: longer rows than a share of 1/120 of all blocks are split, as
    far as its heuristic lets them, and the SM that is free first takes the longest part that is
    left."""
    blocks, tiles = [-(-one // 64) for one in keys], -(-heads // 64)
    share, most = -(-tiles * sum(blocks) // 120), most_parts(len(keys), heads)
    parts: list[int] = []
    for one in blocks:
        each = -(-one // min(-(-one // share), most))
        parts += tiles * [*[each] * (one // each), *([one % each] if one % each else [])]
    busy = [0] * SMS
    for part in sorted(parts, reverse=True):
        first = min(range(SMS), key=busy.__getitem__)
        busy[first] += part
    return max(busy)


@pytest.mark.parametrize("heads", [16, 128])
@given(rows=st.integers(1, 300), keys=st.integers(1, 3 * TOPK))
def test_equal_rows_keep_fa3_busy_as_long_as_its_scheduler_says(
    heads: int, rows: int, keys: int
) -> None:
    features = features_of(Batch.decode([keys] * rows), heads)
    simulated = blocks_of_the_busiest([min(keys, TOPK)] * rows, heads)

    # A row's last part may be shorter than its others.
    assert simulated <= features["blocks_of_the_busiest"] * (1 + 1e-9)
    assert features["blocks_of_the_busiest"] <= 2 * simulated


@pytest.mark.parametrize("heads", [16, 128])
@given(keys=st.lists(st.integers(1, 3 * TOPK), min_size=2, max_size=60))
def test_unequal_rows_keep_fa3_busy_as_long_as_its_scheduler_says(
    heads: int, keys: list[int]
) -> None:
    """But for a row's last part, which may be shorter than its others: a block, for each of the few
    parts that an SM takes."""
    busiest = features_of(Batch.decode(keys), heads)["blocks_of_the_busiest"]
    simulated = blocks_of_the_busiest([min(one, TOPK) for one in keys], heads)

    assert simulated <= busiest <= simulated + 6


def test_long_rows_among_short_ones_are_begun_first() -> None:
    """So that no order of the sequences leaves a long one for the end."""
    ways = [[300] * 200 + [5000] * 100, [5000] * 100 + [300] * 200]

    busiest = {features_of(Batch.decode(keys))["blocks_of_the_busiest"] for keys in ways}
    assert busiest == {35}


@given(keys=st.lists(st.integers(1, 3 * TOPK), min_size=600, max_size=700))
def test_many_unequal_rows_keep_all_sms_equally_busy(keys: list[int]) -> None:
    blocks = sum(-(-min(one, TOPK) // 64) for one in keys)

    busiest = features_of(Batch.decode([*keys, 1, 5000]))["blocks_of_the_busiest"]
    assert busiest == pytest.approx((blocks + 33) / SMS)


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(62, 16), (66, 16), (67, 32), (128, 32), (132, 32), (133, 64), (264, 64), (1000, 256)],
)
def test_at_16_heads_fa3_steps_behind_66_and_132_rows(rows: int, blocks: int) -> None:
    """Up to 66 rows two parts each fit on 132 SMs; up to 132 rows one SM takes a row."""
    assert features_of(Batch.decode([5000] * rows))["blocks_of_the_busiest"] == blocks


@pytest.mark.parametrize(("heads", "rows"), [(16, 423), (64, 106), (128, 53)])
def test_fa3_splits_nothing_once_tiles_full_of_heads_fill_the_device(heads: int, rows: int) -> None:
    """At 128 heads 52 rows of a pass took 120 us, 55 and 56 rows without merging 59 and 89 us. At
    16 heads 150 rows of which five are long took 61 us, too few for unsplit ones."""
    long = [3000] * 5
    split = features_of(Batch.decode([64] * (rows - 6) + long), heads)
    whole = features_of(Batch.decode([64] * (rows - 5) + long), heads)

    assert (split["merges"], whole["merges"]) == (1, 0)
    assert split["blocks_of_the_busiest"] < whole["blocks_of_the_busiest"] == 32


@given(keys=st.lists(st.integers(1, 3 * TOPK), min_size=1, max_size=150))
def test_fa3_s_blocks_are_known_to_less_than_one_a_row(keys: list[int]) -> None:
    rounded = sum(-(-min(one, TOPK) // 64) for one in keys)

    assert abs(value_of("blocks", Batch.decode(keys), 16) - rounded) < len(keys)
    equal = Batch.decode(keys[:1] * len(keys))
    assert value_of("blocks", equal, 16) == -(-min(keys[0], TOPK) // 64) * len(keys)


def test_each_wave_of_parts_costs_what_a_wave_of_rows_does_not() -> None:
    """At 128 heads a row is two tiles: 16 rows of four parts are a wave of 132 SMs, 18 are two."""
    one, two, whole = (
        features_of(Batch.decode([4000] * rows), heads=128) for rows in (16, 18, 100)
    )

    assert (one["parts_merged"], two["parts_merged"]) == (16 * 4, 18 * 4)
    assert (one["waves_merged"], two["waves_merged"], whole["waves_merged"]) == (1, 2, 0)


def test_fa3_merges_parts_only_where_it_splits() -> None:
    split, whole = (features_of(Batch.decode([5000] * rows)) for rows in (66, 130))

    assert (split["parts_merged"], split["merges"]) == (132, 1)
    assert (whole["parts_merged"], whole["merges"]) == (0, 0)


@pytest.mark.parametrize("heads", HEADS)
def test_the_triton_kernel_splits_as_the_formula_says(heads: int) -> None:
    block = 64 if heads > 32 else 32 if heads > 16 else 16
    for rows in range(1, 400):
        expected = sparse_mla._splits(rows * -(-heads // block), TOPK, SMS)
        assert value_of("parts", Batch.decode([5000] * rows), heads) == expected, rows


@pytest.mark.parametrize("heads", HEADS)
def test_the_kernel_for_few_rows_splits_as_the_formula_says(heads: int) -> None:
    for rows in range(1, 400):
        expected = split_sparse_mla.shape_of(rows, heads, TOPK, SMS).splits
        assert value_of("split_parts", Batch.decode([5000] * rows), heads) == expected, rows


def test_the_busiest_sm_has_two_programs_of_the_triton_kernel_behind_66_rows() -> None:
    few, many = (features_of(Batch.decode([5000] * rows), 16) for rows in (66, 67))

    assert few["keys_of_the_busiest"] == 2 * 512
    assert many["keys_of_the_busiest"] == 2 * 1024


@pytest.mark.parametrize("point", ["decode", "prefill"])
def test_only_kernels_that_read_a_layout_have_steps_there(point: str) -> None:
    of_fa3, of_flashmla = "blocks_of_the_busiest", "blocks_of_the_fullest"
    packed = POINTS[point].formulas(setting_of(16, KVLayout.FP8_PACKED)).features
    plain = POINTS[point].formulas(setting_of(16)).features

    assert (of_fa3 in packed, of_flashmla in packed) == (False, True)
    assert (of_fa3 in plain, of_flashmla in plain) == (True, False)


def flashmla_parts(rows: list[int], slots: int) -> list[list[tuple[int, int]]]:
    """FlashMLA's schedule (`get_mla_metadata`) for rows of so many blocks: by slot the rows that it
    begins, by number, and the blocks that it takes of each."""
    time = -(-sum(blocks + 5 for blocks in rows) // slots) + 5
    left, found = list(enumerate(rows)), []
    for _ in range(slots):
        free, own = time, []
        while left and free:
            row, blocks = left[0]
            if blocks + 5 <= free:
                own.append(left.pop(0))
                free -= blocks + 5
            else:
                if free > 5:
                    own.append((row, free - 5))
                    left[0] = (row, blocks - (free - 5))
                free = 0
        found.append(own)
    assert not left
    return found


def check_against_the_schedule(fullest: float, splits_rows: float, rows: int, slots: int) -> None:
    """What the features say of so many whole selections, beside what FlashMLA's schedule does."""
    scheduled = flashmla_parts([32] * rows, slots)
    most = max(sum(blocks + 5 for _, blocks in own) for own in scheduled)

    assert most <= fullest <= most + 5
    if not splits_rows:
        assert {blocks for own in scheduled for _, blocks in own} == {32}


@pytest.mark.parametrize("heads", [16, 128])
@given(rows=st.integers(1, 600))
def test_flashmla_s_fullest_part_is_as_its_schedule_says(heads: int, rows: int) -> None:
    slots = SMS if heads <= 64 else SMS // 2
    features = features_of(Batch.extend([5000], [rows]), heads, "prefill", KVLayout.FP8_PACKED)

    check_against_the_schedule(
        features["blocks_of_the_fullest"], features["splits_rows"], rows, slots
    )


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("next_n", [2, 3, 4])
@given(count=st.integers(1, 300))
def test_a_sequence_s_queries_in_one_row_have_fewer_parts(
    heads: int, next_n: int, count: int
) -> None:
    slots = max((SMS if heads <= 64 else SMS // 2) // next_n, 1)
    batch = Batch.verify([5000] * count, next_n)
    features = features_of(batch, heads, layout=KVLayout.FP8_PACKED)

    check_against_the_schedule(
        features["grouped_blocks_of_the_fullest"], features["grouped_splits_rows"], count, slots
    )


@pytest.mark.parametrize("heads", [16, 128])
@given(queries=st.integers(1, 600))
def test_all_queries_in_one_row_are_split_while_they_leave_sms_over(
    heads: int, queries: int
) -> None:
    slots = SMS if heads <= 64 else SMS // 2
    batch = Batch.extend([5000], [queries])
    features = features_of(batch, heads, "prefill", KVLayout.FP8_PACKED)
    parts = slots // queries

    if parts < 2:
        waves = -(-queries // slots)
        assert features["mixed_blocks_of_the_fullest"] == waves * (32 + 5)
        assert features["mixed_rows_split"] == 0
    else:
        fullest = max(sum(blocks + 5 for _, blocks in own) for own in flashmla_parts([32], parts))
        assert fullest <= features["mixed_blocks_of_the_fullest"] <= fullest + 5
        assert features["mixed_rows_split"] == queries


def test_keys_that_fit_into_the_l2_are_read_from_memory_once() -> None:
    """60 MiB of an H200 are 95,906 tokens of 656 bytes."""

    def missed(prefix: int) -> float:
        batch = Batch.extend([prefix], [64])
        return features_of(batch, 16, "prefill", KVLayout.FP8_PACKED)["missed_pairs"]

    assert missed(95_839) == 0
    assert missed(2 * 95_904 - 64) == pytest.approx(64 * TOPK / 2, rel=1e-4)


@pytest.mark.parametrize("layout", [KVLayout.BF16, KVLayout.FP8_PACKED])
def test_a_few_long_queries_take_a_whole_wave_of_their_own(layout: KVLayout) -> None:
    """Of a prefill whose other queries are short."""
    name = "attended_pairs_in_whole_waves"
    mixed = features_of(Batch.extend([5000, 10], [2, 40]), 16, "prefill", layout)
    short = features_of(Batch.extend([10], [40]), 16, "prefill", layout)

    assert mixed[name] == TOPK * SMS
    assert short[name] == 50 * SMS


def test_equal_queries_take_whole_waves() -> None:
    features = features_of(Batch.extend([5000] * 2, [100] * 2), point="prefill")

    assert features["attended_pairs_in_whole_waves"] == 2 * TOPK * SMS


def until_the_end(rows: Sequence[float], slots: int) -> float:
    """Rows in their order, each in the slot that is free first."""
    busy = [0.0] * slots
    for time in rows:
        busy[busy.index(min(busy))] += time
    return max(busy)


@given(
    runs=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=8),
    slots=st.integers(1, 50),
)
def test_runs_of_equal_rows_end_when_their_rows_one_by_one_do(
    runs: list[tuple[int, int]], slots: int
) -> None:
    rows = [time for time, count in runs for _ in range(count)]

    assert splits.until_the_end(runs, slots) == until_the_end(rows, slots)


LENGTHS = st.lists(st.tuples(st.integers(0, 2 * TOPK), st.integers(1, 30)), min_size=1, max_size=30)


@given(prefix=st.integers(0, 3000), new=st.integers(1, 5000))
def test_a_sequence_s_rows_have_their_mean(prefix: int, new: int) -> None:
    rows = [min(one, TOPK) for one in range(prefix + 1, prefix + new + 1)]

    assert abs(splits.mean_keys(prefix + new, new, TOPK) - fmean(rows)) <= 0.5 + 1e-6


@given(lengths=LENGTHS, slots=st.integers(1, 40))
def test_rows_end_when_slots_that_take_them_in_turn_have_done(
    lengths: list[tuple[int, int]], slots: int
) -> None:
    """Those of a sequence count as equal."""
    prefixes, news = zip(*lengths, strict=True)
    rows = [splits.mean_keys(prefix + new, new, TOPK) for prefix, new in lengths
            for _ in range(new)]  # fmt: skip

    found = splits.keys_until_the_end(Batch.extend(prefixes, news), TOPK, slots)

    if len(rows) <= splits.MOST_TURNS * slots:
        assert found == pytest.approx(until_the_end(rows, slots))
    else:
        even = sum(rows) / slots
        assert even - len(rows) / slots <= found <= even + min(max(rows) + 30, TOPK)


def test_long_rows_after_many_short_ones_are_waited_for() -> None:
    last = splits.keys_until_the_end(Batch.extend([100, 5000], [900, 2]), TOPK, 66)
    first = splits.keys_until_the_end(Batch.extend([5000, 100], [2, 900]), TOPK, 66)

    short = 550 * 900 / 66
    # A hundred queries of the first batch see 1000 keys by now, and are half done.
    assert last == pytest.approx(short - 1000 / 2 + TOPK, abs=100)
    assert first == pytest.approx(short + 1000 / 2, abs=100)


@pytest.mark.parametrize("slots", [66, 132])
def test_the_end_of_many_rows_is_near_that_of_rows_one_by_one(slots: int) -> None:
    """Of random prefills of unequal sequences; the mean error as a part."""
    random = Random(3)
    errors: list[float] = []
    while len(errors) < 60:
        batch = POINTS["prefill"].sample(setting_of(128), random)
        few = batch.q_tokens <= splits.MOST_TURNS * slots
        if few or batch.q_tokens > 4096 or len(set(batch.lens or ())) == 1:
            continue
        rows = [min(prefix + i + 1, 2048) for prefix, new in batch.lens or () for i in range(new)]
        found = splits.keys_until_the_end(batch, 2048, slots)
        errors.append(abs(found / until_the_end(rows, slots) - 1))

    assert fmean(errors) < 0.03, errors


@given(contexts=st.lists(st.integers(4, 2 * TOPK), min_size=1, max_size=60),
       next_n=st.sampled_from([1, 2, 4]), slots=st.integers(1, 40))  # fmt: skip
def test_rows_of_a_decode_end_so_too(contexts: list[int], next_n: int, slots: int) -> None:
    batch = Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)
    rows = [splits.mean_keys(one, next_n, TOPK) for one in contexts for _ in range(next_n)]

    found = splits.keys_until_the_end(batch, TOPK, slots)

    if len(rows) <= splits.MOST_TURNS * slots:
        assert found == pytest.approx(until_the_end(rows, slots))
    else:
        even = sum(rows) / slots
        assert even - len(rows) / slots <= found <= even + min(max(rows) + 30, TOPK)


# --- rows in steps of 128 keys


def in_steps(batch: Batch) -> list[int]:
    """Each row's keys, rounded up to whole steps."""
    lens = zip(batch.kv_lens or (), batch.new_lens or (), strict=True)
    rows = [min(kv - new + i, TOPK) for kv, new in lens for i in range(1, new + 1)]
    return [-(-keys // 128) * 128 for keys in rows]


@pytest.mark.parametrize("point", ["prefill", "decode"])
@given(lengths=LENGTHS, heads=st.sampled_from([16, 128]))
def test_whole_steps_are_more_than_the_keys_and_less_than_the_longest_row_for_all(
    point: str, lengths: list[tuple[int, int]], heads: int
) -> None:
    contexts = [prefix + new for prefix, new in lengths]
    prefill = Batch.extend(*zip(*lengths, strict=True))
    batch = prefill if point == "prefill" else Batch.decode(contexts)
    slots, longest = SMS * 64 // max(heads, 64), max(in_steps(batch))
    found = features_of(batch, heads, point)
    least, most = found["attended_pairs"], batch.q_tokens * longest

    assert max(least, 128 * batch.q_tokens) * 0.999 <= found["pairs_in_steps"] <= most * 1.001
    assert found["steps_in_turn"] >= max(found["pairs_in_steps"] * 0.999, slots * longest)
    assert found["steps_in_turn"] <= -(-batch.q_tokens // slots) * slots * longest


@pytest.mark.parametrize(
    ("point", "mean", "most"), [("decode", 0.005, 0.1), ("prefill", 0.05, 0.5)]
)
@pytest.mark.parametrize("heads", [16, 128])
def test_rows_in_steps_end_about_as_rows_one_by_one_do(
    point: str, mean: float, most: float, heads: int
) -> None:
    """Random batches; rows are begun in their order, each in the slot that is free first."""
    random, slots = Random(5), SMS * 64 // max(heads, 64)
    errors: list[float] = []
    while len(errors) < 150:
        batch = POINTS[point].sample(setting_of(heads), random)
        if batch.q_tokens > 4000:
            continue
        found = features_of(batch, heads, point)["steps_in_turn"] / slots
        errors.append(abs(found / until_the_end(in_steps(batch), slots) - 1))

    assert fmean(errors) < mean
    assert max(errors) < most


@pytest.mark.parametrize(
    ("contexts", "keys"),
    [
        ([515] * 40, 640),
        ([515] * 39 + [514], 640),
        ([300, 515, 700], 768),
        ([250] * 131 + [200], 256),
    ],
)
def test_rows_that_all_have_a_slot_take_as_long_as_the_longest(
    contexts: list[int], keys: int
) -> None:
    assert features_of(Batch.decode(contexts))["steps_in_turn"] == keys * SMS


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ("decode", "attended_pairs_in_waves_to_the_longest"),
        ("prefill", "attended_pairs_in_whole_waves"),
    ],
)
def test_it_matters_whether_long_rows_come_last(point: str, name: str) -> None:
    """140 rows on 132 SMs: eight begin when eight of 300 keys have ended."""
    contexts = [300] * 16 + [9000] * 124
    last, first = (features_of(_single_rows(point, x), point=point)[name] for x in _ways(contexts))

    assert last == (300 + TOPK) * SMS
    assert first == TOPK * SMS


def _ways(contexts: list[int]) -> tuple[list[int], list[int]]:
    return contexts, contexts[::-1]


def _single_rows(point: str, contexts: list[int]) -> Batch:
    if point == "decode":
        return Batch.decode(contexts)
    return Batch.extend([one - 1 for one in contexts], [1] * len(contexts))


@pytest.mark.parametrize("device", [0, 1])
def test_any_number_of_sms_has_features(device: int) -> None:
    setting = replace(setting_of(128), device=replace(KNOWN["NVIDIA H200"], sms=device))

    assert all(one >= 0 for one in Features(DECODE, setting).by_name(Batch.decode([7])).values())


@pytest.mark.parametrize(
    ("heads", "rows", "best"),
    [(16, 62, "fa3"), (16, 74, "flashmla_sparse"), (128, 22, "fa3"), (128, 41, "flashmla_sparse")],
)
def test_the_shipped_tables_know_the_steps_between_the_rows_that_were_measured(
    heads: int, rows: int, best: str
) -> None:
    """Rows of 64 and 128, or 16, 32 and 64, are in the tables; a pass over these is faster so."""
    dispatcher = Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3.2", heads=heads, kv_dtype="bf16"
    )

    assert dispatcher.plan(Batch.decode([9000] * rows)).decode == best


UNEVEN = (
    "target_verify:n4:22475,1084,23194,400,288,1035,15116,290,6218,4730,768,10841,24315,1554,748,"
    "18663,9616,7519,12456,2812,6451,6477,6760,11263,4086,27467,16262,268,500,281,9330,11607,15249,"
    "986"
)


UNSPLIT = (
    "target_verify:n4:1546,9299,2888,15405,4883,349,8585,1944,291,428,5403,6044,2241,4065,4823,"
    "1929,4694,2066,927,12018,3669,739,20822,4273,15339,424,2491,12908,583,1938,4260,302,18549,"
    "8722,2701,737,285"
)


@pytest.mark.parametrize(
    ("heads", "batch", "field", "best"),
    [
        (16, UNEVEN, "decode", "flashmla_sparse"),
        (16, UNSPLIT, "decode", "fa3"),
        (16, "extend:29937+5,33+7,474+138", "sparse_prefill", "fa3"),
        (128, "extend:14637+55,228+21,28846+4", "sparse_prefill", "fa3"),
        (128, "extend:12+6,6799+2,508+3,12+7,4123+15,46+2,119+13", "sparse_prefill", "fa3"),
    ],
)
def test_the_shipped_tables_know_how_unequal_rows_are_taken(
    heads: int, batch: str, field: str, best: str
) -> None:
    """Passes of 61 layers by the other one of the two kernels take 11 to 26 % longer."""
    dispatcher = Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3.2", heads=heads, kv_dtype="bf16"
    )

    assert getattr(dispatcher.plan(Batch.parse(batch)), field) == best
