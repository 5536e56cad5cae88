"""What to set and what it gives: from measured times, against the engine's defaults."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest

from nsa_tune import Batch
from nsa_tune.backend.types.records import Table
from nsa_tune.reports.analysis.answer import (
    Answer,
    Saving,
    decided_together,
    less_than_one,
    percent,
)
from nsa_tune.reports.analysis.report import Section, build
from nsa_tune.reports.formats.display_tables import (
    BASIS,
    DEMONSTRATION,
    NO_ANSWER,
    answer_texts,
)
from tests.reports.synthetic import real_table

NOTHING = Saving(0.0, 0.0)


@pytest.fixture(scope="module")
def section() -> Section:
    """Of a device on which flashmla_sparse is twice as fast as elsewhere."""
    table = real_table(
        points=("prefill",),
        scale=lambda arm, batch: 0.5 if arm == "mla/flashmla_sparse" else 1.0,
    )
    return build([table]).sections[0]


def _of(table: Table) -> Answer:
    (answer,) = build([table]).sections[0].answers
    return answer


def test_a_flag_changes_the_kernel_where_the_engine_takes_mla(section: Section) -> None:
    cells = {
        question.name: {cell.word: cell for cell in question.cells}
        for question in section.questions
    }
    ratios = []
    for word, path in cells["prefill_path"].items():
        times = cells["sparse_prefill"][word].times
        if "flashmla_kv" in times:
            faster = times["flashmla_sparse"].latency_us / times["flashmla_kv"].latency_us
            ratios.append(1.0 if path.default == "mha" else faster)
        elif path.default == "mha":
            ratios.append(1.0)

    (answer,) = section.answers
    assert (answer.flag, answer.default) == ("--dsa-prefill-backend", "flashmla_kv")
    assert answer.value == "flashmla_sparse"
    assert answer.batches == len(ratios)
    assert answer.by_flag.mean == pytest.approx(1 - geometric_mean(ratios))


def test_choosing_for_each_batch_gives_at_least_what_a_flag_does(section: Section) -> None:
    (answer,) = section.answers

    assert answer.by_batch.mean > answer.by_flag.mean > 0.01
    assert answer.by_batch.total > answer.by_flag.total > 0.01


def test_a_way_that_the_plug_in_does_not_take_gives_nothing() -> None:
    table = real_table(points=("prefill",))
    merged = [
        replace(row, arm="mha/fa3_merged", latency_us=row.latency_us / 2, low_us=None, high_us=None)
        for row in table.measurements
        if row.arm == "mha/fa3" and row.latency_us is not None
    ]

    with_merged = _of(replace(table, measurements=(*table.measurements, *merged)))

    # The models are fitted anew, and may choose otherwise on a batch or two.
    assert with_merged.by_batch.mean == pytest.approx(_of(table).by_batch.mean, abs=0.002)


@pytest.mark.parametrize(
    ("flag", "by_batch", "by_flag", "sentence"),
    [
        ("--x", Saving(0.2, 0.1), Saving(0.05, 0.03),
         "Install the plug-in, which chooses for each batch: 20 % less attention time in prefill "
         "than by SGLang's defaults. The best single flag, `--x b`, gives 5 %."),
        ("--x", Saving(0.2, 0.1), NOTHING,
         "Install the plug-in, which chooses for each batch: 20 % less attention time in prefill "
         "than by SGLang's defaults. No single value of `--x` gives 1 %."),
        ("--x", Saving(0.056, 0.04), Saving(0.05, 0.03),
         "Start SGLang with `--x b`: 5 % less attention time in prefill. Choosing for each batch "
         "adds nothing."),
        ("--x", Saving(0.007, 0.02), NOTHING,
         "Leave SGLang as it is in prefill: choosing for each batch saves 0.7 % by the mean."),
        ("", Saving(0.12, 0.003), NOTHING,
         "Leave SGLang as it is in prefill: choosing for each batch saves 0.3 % of the batches' "
         "total time."),
        ("", Saving(0.056, 0.03), NOTHING,
         "Choosing for each batch takes 5.6 % less attention time in prefill than by SGLang's "
         "defaults. No plug-in asks this table by default."),
    ],
    ids=["plug-in", "no flag", "flag", "nothing", "short batches only", "no option"],
)  # fmt: skip
def test_the_sentence_says_what_to_set(
    flag: str, by_batch: Saving, by_flag: Saving, sentence: str
) -> None:
    answer = Answer("prefill", "SGLang", 9, by_batch, flag, "a", "b", by_flag)

    assert answer.sentence == sentence
    assert (percent(answer.gain) in sentence) == (answer.gain > 0)


def test_a_decode_is_chosen_for_a_captured_size() -> None:
    answer = Answer("decode", "SGLang", 9, Saving(0.2, 0.1), "--x", "a", "a", NOTHING)

    assert "Choosing for each captured size takes 20 %" in answer.sentence
    assert answer.basis.endswith("of their total time 10 % by choosing for each captured size.")


def test_a_graph_holds_one_choice_for_all_contexts_of_its_size() -> None:
    prefills = [Batch.extend([0], [64]), Batch.extend([64], [64])]
    decodes = [Batch.decode([context] * 8) for context in (2048, 65536)]
    others = [Batch.decode([2048] * 9), Batch.verify([2048] * 8, next_n=2)]

    groups = list(decided_together([*prefills, *decodes, *others]))

    assert groups == [[prefills[0]], [prefills[1]], decodes, [others[0]], [others[1]]]


def test_a_flag_that_only_helps_short_batches_is_not_set() -> None:
    assert Saving(0.02, 0.015).pays
    assert not Saving(0.05, -0.01).pays
    assert not Saving(0.005, 0.2).pays


def test_the_texts_say_what_they_are_based_on(section: Section) -> None:
    first, last = answer_texts(section)

    assert "measured batches, each counting the same" in first
    assert last == BASIS


def test_a_cpu_answers_nothing_for_a_gpu() -> None:
    table = real_table(points=("prefill",))
    on_cpu = replace(table, device=replace(table.device, arch="cpu"))

    assert answer_texts(build([on_cpu]).sections[0]) == [f"Demonstration. {DEMONSTRATION}"]


def test_a_table_without_attention_has_no_answer() -> None:
    section = build([real_table(points=("indexer_layout",))]).sections[0]

    assert section.answers == ()
    assert answer_texts(section) == [NO_ANSWER]


def test_shares_read_as_per_cent() -> None:
    assert [percent(share) for share in (0.214, 0.1, 0.0957, 0.004)] == [
        "21 %", "10 %", "9.6 %", "0.4 %",
    ]  # fmt: skip
    assert less_than_one(0.004) == "under 1 %"
