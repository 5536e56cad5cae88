"""What a run's options mean to SGLang; and all of them that matter are documented."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import run
from benchmarks.engine.arguments import (
    add_engine_options,
    add_run_options,
    engine_arguments,
    fill_in,
    model_folder,
    simulated_acceptance,
)
from benchmarks.engine.cases import GRID, Case, cases_of, decode_batches_of, ragged_cases
from benchmarks.engine.configurations import DEFAULT, configurations_for
from nsa_tune.backend.types.profiles import REUSING, profile_of

_DOCS = (Path(__file__).parents[3] / "docs" / "engine.md").read_text(encoding="utf-8")


def _options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_run_options(parser)
    return fill_in(parser.parse_args(given))


def _model(tmp_path: Path, *given: str) -> dict[str, Any]:
    folder = model_folder(_options(*given), tmp_path)
    return dict(json.loads((folder / "config.json").read_text()))


def test_one_rank_has_its_share_of_heads_and_experts(tmp_path: Path) -> None:
    model = _model(tmp_path, "--tp", "8", "--heads", "16", "--layers", "61")
    assert (model["num_attention_heads"], model["num_hidden_layers"]) == (16, 61)
    assert (model["intermediate_size"], model["moe_intermediate_size"]) == (2304, 256)
    assert model["n_routed_experts"] == 256


def test_one_rank_of_attention_dp_has_all_heads_and_some_whole_experts(tmp_path: Path) -> None:
    model = _model(tmp_path, "--tp", "1", "--ep", "8")
    assert (model["num_attention_heads"], model["n_routed_experts"]) == (128, 32)
    assert (model["intermediate_size"], model["moe_intermediate_size"]) == (18432, 2048)
    # A token is sent to as many experts as in all ranks together, where each has as many tokens.
    assert model["num_experts_per_tok"] == 8
    v4 = _model(tmp_path, "--model", "deepseek-v4-flash", "--tp", "1", "--ep", "8", "--layers", "4")
    assert v4["compress_ratios"] == [0, 0, 4, 128] and v4["num_key_value_heads"] == 1


def test_a_model_says_what_was_not_asked_for(tmp_path: Path) -> None:
    v32, glm = _options(), _options("--model", "glm-5")
    assert [(o.layers, o.as_layers, o.heads) for o in (v32, glm)] == [(61, 61, 16), (78, 78, 8)]
    assert _options("--model", "kimi-k2").heads == profile_of("kimi-k2").heads // 8
    cut = _options("--model", "glm-5", "--layers", "6", "--as-layers", "0", "--heads", "64")
    assert (cut.layers, cut.as_layers, cut.heads) == (6, 0, 64)
    model = _model(tmp_path, "--model", "glm-5")
    assert model["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert (model["num_attention_heads"], model["moe_intermediate_size"]) == (8, 256)


def test_glm_5_2_runs_the_indexer_in_some_of_its_layers(tmp_path: Path) -> None:
    model, (name, indexers) = _model(tmp_path, "--model", "glm-5.2"), REUSING["glm-5.2"]
    freq, offset = model["index_topk_freq"], model["index_skip_topk_offset"]
    # As SGLang's configs/model_config.py counts them.
    layers = range(model["num_hidden_layers"])
    assert sum(max(layer - offset + 1, 0) % freq == 0 for layer in layers) == indexers
    assert model["index_n_heads"] == profile_of(name).index_heads


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_a_model_has_the_attention_of_its_profile(name: str, tmp_path: Path) -> None:
    model, profile = _model(tmp_path, "--model", name, "--tp", "1"), profile_of(name)
    assert [
        model[field]
        for field in (
            "num_attention_heads", "num_hidden_layers", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
        )
    ] == [
        profile.heads, profile.layers, profile.rank, profile.nope, profile.rope, profile.v,
        profile.index_heads, profile.index_dim, profile.index_topk,
    ]  # fmt: skip


@pytest.mark.parametrize(("dp", "heads"), [("1", 32), ("2", 16)])
def test_a_real_group_has_the_shares_of_its_ranks(tmp_path: Path, dp: str, heads: int) -> None:
    given = ("--tp", "8", "--heads", "16", "--real-tp", "2", "--real-dp", dp)
    model = _model(tmp_path, *given)
    # Data-parallel attention shares no heads among its ranks, tensor parallelism all of them.
    assert model["num_attention_heads"] == heads
    assert model["moe_intermediate_size"] == 512
    named = engine_arguments(_options(*given), tmp_path)
    assert named["tp_size"] == 2
    assert named.get("enable_dp_attention", False) is (dp == "2")


def test_only_what_is_asked_for_is_given_to_the_engine(tmp_path: Path) -> None:
    plain = engine_arguments(_options(), tmp_path)
    assert plain["cuda_graph_max_bs_prefill"] == 8192
    assert not any("speculative" in name or "backend" in name for name in plain if name not in
                   ("sampling_backend", "grammar_backend"))  # fmt: skip
    off = engine_arguments(_options("--prefill-graph", "off"), tmp_path)
    assert off["disable_prefill_cuda_graph"] and "cuda_graph_bs_prefill" not in off
    own = engine_arguments(_options("--engine", '{"page_size": 1}', "--chunk", "512"), tmp_path)
    assert (own["page_size"], own["chunked_prefill_size"]) == (1, 512)


def test_speculation_accepts_as_many_tokens_as_is_said(tmp_path: Path) -> None:
    options = _options("--spec", "3/1/4")
    named = engine_arguments(options, tmp_path)
    assert named["speculative_num_steps"] == 3 and named["speculative_num_draft_tokens"] == 4
    assert simulated_acceptance(options)["SGLANG_SIMULATE_ACC_LEN"] == "2.952"
    asked = _options("--spec", "1/1/2", "--accept", "1.5")
    assert simulated_acceptance(asked)["SGLANG_SIMULATE_ACC_LEN"] == "1.5"
    assert simulated_acceptance(_options()) == {}
    assert simulated_acceptance(_options("--spec", "1/1/2", "--accept", "0")) == {}


def test_the_grid_has_whole_pages_and_no_batch_twice() -> None:
    cases = cases_of(GRID)
    assert len(set(cases)) == len(cases) >= 24
    assert str(len(cases)) + " batches" in _DOCS


_PAGES = st.integers(0, 40).map(lambda pages: 64 * pages)


@given(st.lists(st.tuples(_PAGES, st.integers(1, 4000)), min_size=1, max_size=9))
def test_a_batch_with_different_lengths_is_read_as_written(lengths: list[tuple[int, int]]) -> None:
    prefix, new = (list(column) for column in zip(*lengths, strict=True))
    (case,) = ragged_cases([json.dumps({"prefix": prefix, "new": new, "only": "plugin"}), ""])
    assert (case.repeats, case.only) == (None, "plugin")
    assert list(zip(case.prefix, case.new, strict=True)) == lengths
    assert case.tokens == sum(prefix) + sum(new)
    assert case.name.startswith("ragged") is (len(set(lengths)) > 1)


def test_a_batch_may_have_repeated_tokens_of_its_own() -> None:
    random, repeated = cases_of("0:64:2 0:64:2:0.9")
    assert (random.repeats, repeated.repeats) == (None, 0.9)
    assert repeated.name == random.name + ", 0.9 repeat"


@pytest.mark.parametrize(
    ("prefix", "new"), [((), ()), ((0,), (1, 2)), ((0,), (0,)), ((63,), (1,)), ((-64,), (1,))]
)
def test_batches_that_cannot_be_are_refused(prefix: tuple[int, ...], new: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs|keeps"):
        Case(prefix, new)


def test_decode_batches_have_a_context_of_their_own_or_the_common_one() -> None:
    assert decode_batches_of("1,8 128:2048", 4096) == [(1, 4096), (8, 4096), (128, 2048)]


def test_every_test_and_configuration_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _DOCS, re.MULTILINE)
    assert set(run.TESTS) <= set(rows)
    for dtype in ("bf16", "fp8"):
        names = [f"`{one.name}`" for one in configurations_for(dtype)]
        assert f"| {dtype} | {', '.join(names)} |" in _DOCS
        assert configurations_for(dtype)[0].name == DEFAULT


def test_every_option_in_the_docs_exists() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_run_options(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    elsewhere = {"--parts", "--sglang", "--out", "--seed", "--html", "--help", "--of"}
    assert set(re.findall(r"--[a-z][a-z-]+", _DOCS)) - elsewhere <= known
