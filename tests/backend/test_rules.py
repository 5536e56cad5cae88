"""SGLang 0.5.23's own choices, written down once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune.backend.batch import Batch
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Answer, Setting
from nsa_tune.backend.profiles import profile_of
from nsa_tune.backend.records import Device
from nsa_tune.backend.rules import SGLANG_0_5_23 as SGLANG


def _setting(arch: str, layout: KVLayout = KVLayout.FP8_PACKED) -> Setting:
    return Setting(profile_of("deepseek-v3.2"), 128, layout, Device("some device", arch))


def _choose(name: str, batch: Batch, setting: Setting) -> str:
    return SGLANG.choose(Answer(name, {"first": (), "second": ()}), batch, setting)


_SHORT = Batch.extend([1920], [128])


@pytest.mark.parametrize(
    ("arch", "path"),
    [("sm90", "mha"), ("sm100", "mha"), ("sm103", "mha"), ("sm120", "mla"), ("sm80", "mla"),
     ("cpu", "mha"), ("", "mla")],
)  # fmt: skip
def test_short_prefill_is_dense_on_hopper_and_data_centre_blackwell(arch: str, path: str) -> None:
    assert _choose("prefill_path", _SHORT, _setting(arch)) == path


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (Batch.extend([2047], [1]), "mha"),
        (Batch.extend([2048], [1]), "mla"),
        (Batch.extend([0] * 64, [2048] * 64), "mha"),
        (Batch.extend([0] * 65, [2048] * 64 + [1]), "mla"),
        (Batch.extend([0], [1], captured=True), "mla"),
    ],
)
def test_dense_needs_short_sequences_a_fitting_chunk_and_no_capture(
    batch: Batch, path: str
) -> None:
    assert _choose("prefill_path", batch, _setting("sm90")) == path


def test_neither_new_tokens_nor_heads_matter_to_the_rule() -> None:
    setting = _setting("sm90")

    for batch in (Batch.extend([1], [2047]), Batch.extend([2047], [1])):
        for heads in (16, 128):
            assert _choose("prefill_path", batch, replace(setting, heads=heads)) == "mha"


@pytest.mark.parametrize(
    ("arch", "layout", "kernel"),
    [
        ("sm90", KVLayout.FP8_PACKED, "flashmla_kv"),
        ("sm100", KVLayout.FP8_PACKED, "trtllm"),
        ("sm90", KVLayout.BF16, "flashmla_sparse"),
        ("sm100", KVLayout.BF16, "flashmla_sparse"),
        ("cpu", KVLayout.FP8_PACKED, "torch_kv"),
        ("cpu", KVLayout.BF16, "torch_sparse"),
    ],
)
def test_the_sparse_prefill_kernel_follows_the_pool_and_the_architecture(
    arch: str, layout: KVLayout, kernel: str
) -> None:
    assert _choose("sparse_prefill", _SHORT, _setting(arch, layout)) == kernel


@pytest.mark.parametrize(
    ("arch", "kernel"), [("sm90", "fa3"), ("sm100", "trtllm_ragged"), ("cpu", "torch")]
)
def test_the_dense_kernel_follows_the_architecture(arch: str, kernel: str) -> None:
    assert _choose("mha_kernel", _SHORT, _setting(arch)) == kernel


@pytest.mark.parametrize(
    ("batch", "arch", "layout"),
    [
        (Batch.verify([99], 2), "sm100", "native"),
        (Batch.verify([99], 4), "sm100", "native"),
        (Batch.verify([99], 1), "sm100", "flatten"),
        (Batch.draft_extend([99], 2), "sm100", "flatten"),
        (Batch.decode([99]), "sm100", "flatten"),
        (Batch.verify([99], 2), "sm90", "flatten"),
        (Batch.verify([99], 2), "sm120", "flatten"),
        (Batch.verify([99], 2), "cpu", "flatten"),
    ],
)
def test_only_a_verify_on_sm100_is_native(batch: Batch, arch: str, layout: str) -> None:
    assert _choose("indexer_layout", batch, _setting(arch)) == layout


def test_a_question_that_the_engine_does_not_ask_gets_the_first_declared_choice() -> None:
    assert _choose("colour", _SHORT, _setting("sm90")) == "first"
    assert SGLANG.source("colour") == "SGLang 0.5.23"


@pytest.mark.parametrize("name", SGLANG.defaults)
def test_each_default_names_file_and_line(name: str) -> None:
    file, _, line = SGLANG.source(name).removeprefix("SGLang 0.5.23 ").partition(":")

    assert file.endswith(".py")
    assert line.isdecimal()
