"""Headings are words: every question has a title, and batches read as sentences."""

from __future__ import annotations

import pytest

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.reports.analysis.words import batch_title, question_title


def test_no_title_is_an_identifier() -> None:
    for point in POINTS.values():
        for question in point.questions:
            assert "_" not in question_title(question.name)


def test_a_mode_names_the_phase() -> None:
    assert question_title("prefill_path") == "Prefill: MHA or MLA"
    assert question_title("decode", Mode.TARGET_VERIFY) == "Verification: attention kernel"
    assert question_title("indexer_metadata") == "Indexer schedule kernel"


@pytest.mark.parametrize(
    ("batch", "title"),
    [
        (Batch.extend([0], [1]), "1 new token"),
        (Batch.extend([1920], [128]), "128 new tokens behind 1920"),
        (Batch.extend([1024] * 4, [512] * 4), "4 sequences, each 512 new tokens behind 1024"),
        (Batch.decode([8192]), "decode of 1 sequence with 8192 tokens of context"),
        (Batch.extend([0, 16], [4, 4]), "extend:0+4,16+4"),
    ],
    ids=str,
)
def test_a_batch_of_equal_sequences_reads_as_words(batch: Batch, title: str) -> None:
    assert batch_title(batch) == title
