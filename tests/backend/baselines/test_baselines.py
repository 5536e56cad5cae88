"""The engines' own choices, written down once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune import UnknownName
from nsa_tune.backend.baselines import BASELINES, Baseline, baseline_of
from nsa_tune.backend.baselines import SGLANG_0_5_23 as SGLANG
from nsa_tune.backend.baselines import VLLM_0_33_0 as VLLM
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Question, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device


def _setting(arch: str, layout: KVLayout = KVLayout.FP8_PACKED) -> Setting:
    return Setting(profile_of("deepseek-v3.2"), 128, layout, Device("some device", arch))


def _choose(name: str, batch: Batch, setting: Setting, baseline: Baseline = SGLANG) -> str:
    return baseline.choose(Question(name, {"first": (), "second": ()}), batch, setting)


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


def test_neither_new_tokens_nor_heads_matter_to_the_baseline() -> None:
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


@pytest.mark.parametrize(
    ("baseline", "name"), [(one, name) for one in BASELINES.values() for name in one.defaults],
    ids=lambda one: one.name if isinstance(one, Baseline) else one,
)  # fmt: skip
def test_each_default_names_files_and_lines(baseline: Baseline, name: str) -> None:
    for place in baseline.source(name).removeprefix(f"{baseline.name} ").split(", "):
        file, _, line = place.partition(":")
        assert file.endswith(".py")
        assert line.isdecimal()


def test_baselines_are_found_by_name() -> None:
    assert baseline_of("vLLM 0.33.0") is VLLM
    with pytest.raises(UnknownName, match=r"SGLang 0\.5\.23"):
        baseline_of("SGLang 0.0.1")


# --- vLLM


@pytest.mark.parametrize(
    ("arch", "heads", "new", "path"),
    [
        ("sm90", 128, 256, "mla"),
        ("sm90", 128, 257, "mha"),
        ("sm90", 16, 128, "mla"),
        ("sm90", 16, 129, "mha"),
        ("sm100", 128, 1024, "mla"),
        ("sm100", 128, 1025, "mha"),
        ("sm120", 128, 2000, "mla"),
    ],
)
def test_vllm_takes_few_new_tokens_for_a_decode(arch: str, heads: int, new: int, path: str) -> None:
    setting = replace(_setting(arch), heads=heads)

    assert _choose("prefill_path", Batch.extend([0], [new]), setting, VLLM) == path


def test_vllm_keeps_within_index_topk_and_out_of_graphs() -> None:
    setting = _setting("sm90")

    assert _choose("prefill_path", Batch.extend([1], [2048]), setting, VLLM) == "mla"
    captured = Batch.extend([0], [2048], captured=True)
    assert _choose("prefill_path", captured, setting, VLLM) == "mla"


@pytest.mark.parametrize(
    ("arch", "layout", "heads", "new", "kernel"),
    [
        ("sm90", KVLayout.FP8_PACKED, 128, 2000, "flashmla_sparse"),
        ("sm90", KVLayout.FP8_PACKED, 128, 200, "flashmla_kv"),
        ("sm90", KVLayout.FP8_PACKED, 16, 2000, "flashmla_kv"),
        ("sm100", KVLayout.FP8_PACKED, 128, 2000, "trtllm"),
        ("sm100", KVLayout.BF16, 128, 2000, "flashmla_sparse"),
        ("cpu", KVLayout.BF16, 128, 2000, "torch_sparse"),
    ],
)
def test_vllm_s_sparse_kernel_follows_the_pool_the_heads_and_the_new_tokens(
    arch: str, layout: KVLayout, heads: int, new: int, kernel: str
) -> None:
    setting = replace(_setting(arch, layout), heads=heads)

    assert _choose("sparse_prefill", Batch.extend([4096], [new]), setting, VLLM) == kernel


@pytest.mark.parametrize(
    ("arch", "next_n", "layout"),
    [("sm90", 2, "native"), ("sm90", 3, "flatten"), ("sm90", 4, "native"), ("sm100", 3, "native")],
)
def test_vllm_s_rows_follow_its_own_deep_gemm(arch: str, next_n: int, layout: str) -> None:
    batch = Batch.verify([99], next_n)

    assert _choose("indexer_layout", batch, _setting(arch), VLLM) == layout


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=list(BASELINES))
def test_a_baseline_has_a_default_for_every_question(baseline: Baseline) -> None:
    questions = {answer.name for point in POINTS.values() for answer in point.questions}

    assert questions == set(baseline.defaults)


def test_vllm_widens_v4_s_pools_in_prefill_and_schedules_with_deep_gemm() -> None:
    setting = replace(_setting("sm90", KVLayout.V4_PAGED), profile=profile_of("deepseek-v4"))
    batch = Batch.extend([4096], [2000])

    assert _choose("v4_prefill_c4", batch, setting, VLLM) == "sparse_fwd"
    assert _choose("v4_prefill_c128", batch, setting, VLLM) == "sparse_fwd"
    assert _choose("indexer_metadata", Batch.decode([99]), setting, VLLM) == "deep_gemm"


def test_both_engines_gather_the_indexer_s_keys_and_vllm_bounds_the_logits() -> None:
    setting = _setting("sm90")
    small, big = Batch.extend([4096], [1000]), Batch.extend([32768], [8192])

    assert _choose("indexer_prefill", big, setting) == "ragged"
    assert _choose("indexer_prefill", small, setting, VLLM) == "ragged"
    assert _choose("indexer_prefill", big, setting, VLLM) == "chunked"
    assert _choose("indexer_topk", Batch.decode([9000]), setting) == "sglang"
    assert _choose("indexer_topk", Batch.decode([9000]), setting, VLLM) == "vllm"
    for question in ("indexer_prefill", "indexer_topk"):
        assert _choose(question, big, _setting("cpu")) == "torch"
        assert _choose(question, big, _setting("cpu"), VLLM) == "torch"
