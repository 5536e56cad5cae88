"""What the plug-in takes for granted of vLLM, read again in the wheels."""

from __future__ import annotations

import ast

import pytest

from nsa_tune.engines.releases import Release
from nsa_tune.engines.vllm import EDGE
from nsa_tune.engines.vllm.releases import release_of
from tests.engines.vllm.engine import (
    BACKEND,
    COMMON,
    FA3,
    FLASHMLA,
)
from tests.engines.vllm.wheels import VERSIONS
from tests.engines.wheels import Wheel

INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_BUILDER = "FlashMLASparseMetadataBuilder"


def _release(wheel: Wheel) -> Release:
    release = release_of(wheel.version)
    assert release is not None
    return release


def _body(wheel: Wheel, file: str, path: str) -> str:
    return ast.unparse(wheel.definition(file, path))


def _readers(wheel: Wheel, attribute: str, *, under: str = "vllm/") -> set[str]:
    return {
        name
        for name in wheel.names(under)
        if name.endswith(".py") and f".{attribute}" in wheel.text(name)
    }


def test_each_hooked_symbol_is_there_with_its_signature(wheel: Wheel) -> None:
    for symbol in _release(wheel).symbols:
        method = wheel.definition(symbol.module.replace(".", "/") + ".py", symbol.path)

        assert isinstance(method, ast.FunctionDef)
        given = method.args
        stars = [one for one in (given.vararg, given.kwarg) if one is not None]
        names = tuple(one.arg for one in (*given.args, *given.kwonlyargs, *stars))
        assert symbol.accepts(names), symbol


def test_plug_ins_are_loaded_from_the_group_and_called_without_a_guard(wheel: Wheel) -> None:
    body = _body(wheel, "vllm/plugins/__init__.py", "load_general_plugins")

    assert "try" not in body
    assert 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"' in wheel.text(
        "vllm/plugins/__init__.py"
    )


def test_info_lines_are_shown_of_vllm_s_own_loggers_only(wheel: Wheel) -> None:
    (config,) = (
        node.value
        for node in ast.parse(wheel.text("vllm/logger.py")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "DEFAULT_LOGGING_CONFIG"
    )
    assert isinstance(config, ast.Dict)
    parts = zip(config.keys, config.values, strict=True)
    (loggers,) = (part for key, part in parts if key and ast.unparse(key) == "'loggers'")

    assert isinstance(loggers, ast.Dict)
    assert [ast.unparse(key) for key in loggers.keys if key] == ["'vllm'"]
    assert EDGE._log.name.startswith("vllm.")


def test_the_base_class_splits_by_the_builders_threshold(wheel: Wheel) -> None:
    body = _body(wheel, COMMON, "SparseMLACommonMetadataBuilder.build")

    assert "decode_threshold=self.reorder_batch_threshold or 1" in body
    assert "require_uniform=self.require_uniform_decodes" in body
    assert "use_dense_mha=_use_dense_mha_prefill" in body
    assert body.count("self.reorder_batch_threshold") == 1


def test_flashmlas_builder_calls_the_base_class_and_then_reads_its_switch(wheel: Wheel) -> None:
    body = _body(wheel, FLASHMLA, f"{_BUILDER}.build")
    base = "super().build(common_prefix_len, common_attn_metadata, fast_build)"

    assert base in body
    assert body.index(base) < body.index("self.fp8_use_mixed_batch")
    assert "require_uniform_decodes: ClassVar[bool] = True" in _body(wheel, FLASHMLA, _BUILDER)


def test_other_builders_have_no_build_of_their_own_in_between(wheel: Wheel) -> None:
    assert not wheel.has(FA3, "FlashAttnMLASparseMetadataBuilder.build")
    for kind, file in ((_BUILDER, FLASHMLA), ("FlashAttnMLASparseMetadataBuilder", FA3)):
        assert not wheel.has(file, f"{kind}.build_for_cudagraph_capture")
        assert not wheel.has(file, f"{kind}.build_for_drafting")
    assert not wheel.has(COMMON, "SparseMLACommonMetadataBuilder.build_for_cudagraph_capture")


def test_graphs_hold_steps_of_decodes_alone(wheel: Wheel) -> None:
    uniform = "_cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH"
    kinds = {
        FLASHMLA: _BUILDER,
        FA3: "FlashAttnMLASparseMetadataBuilder",
    }
    for file, kind in kinds.items():
        assert uniform in _body(wheel, file, kind)


def test_a_builder_for_drafting_says_that_it_must_be_quick(wheel: Wheel) -> None:
    body = _body(wheel, BACKEND, "AttentionMetadataBuilder.build_for_drafting")

    assert "fast_build=True" in body


def test_the_thresholds_and_the_fewest_heads_are_those_of_the_baseline(wheel: Wheel) -> None:
    body = _body(wheel, FLASHMLA, f"{_BUILDER}.__init__")

    assert "{16: 128, 32: 128, 64: 256, 128: 256}.get(num_q_heads, 256)" in body
    assert "{8: 128, 16: 128, 32: 128, 64: 256, 128: 1024}.get(num_q_heads, 1024)" in body
    assert "\nMIN_HEADS_FOR_BF16_PREFILL = 32\n" in wheel.text(FLASHMLA)
    assert "self.fp8_use_mixed_batch = self.num_heads < MIN_HEADS_FOR_BF16_PREFILL and" in body


def test_the_layers_read_the_switch_from_the_metadata_alone(wheel: Wheel) -> None:
    impl = ast.unparse(wheel.definition(FLASHMLA, "FlashMLASparseImpl"))
    readers = _readers(wheel, "fp8_use_mixed_batch", under="vllm/")

    assert "attn_metadata.fp8_use_mixed_batch" in impl
    assert "self.fp8_use_mixed_batch" not in impl
    assert {name for name in readers if "hy_v4" not in name} <= {FLASHMLA, *_others(readers)}


def _others(readers: set[str]) -> set[str]:
    """Builders of other models, which copy the field."""
    return {name for name in readers if "/models/" in name}


def test_room_for_widened_latents_is_kept_in_either_mode(wheel: Wheel) -> None:
    """So a step may take the sparse kernel in an engine that was started for the other."""
    init = _body(wheel, FLASHMLA, "FlashMLASparseImpl.__init__")
    reserve = "prefill_workspace_size = get_prefill_workspace_size(vllm_config"

    assert reserve in init
    assert "MIN_HEADS_FOR_BF16_PREFILL" not in init
    condition = init[: init.index(reserve)].rpartition("\n    if ")[2]
    assert condition.startswith("kv_cache_dtype ")
    hopper = "128 if current_platform.is_device_capability_family(100) else 64"
    padding = hopper if wheel.version == "0.31.0" else "64"
    assert f"self.prefill_padding = {padding}" in init


def test_the_indexer_asks_the_same_field_whether_mha_runs(wheel: Wheel) -> None:
    text = wheel.text("vllm/model_executor/layers/sparse_attn_indexer.py")

    assert 'getattr(prefill_metadata, "use_dense_mha", False)' in text
    body = _body(
        wheel, "vllm/model_executor/layers/attention/mla_attention.py",
        "MLAAttention._use_sparse_mha",
    )  # fmt: skip
    assert "use_dense_mha" in body


def test_the_facts_are_where_they_are_looked_for(wheel: Wheel) -> None:
    parallel = wheel.text("vllm/config/parallel.py")
    speculative = wheel.text("vllm/config/speculative.py")
    attention = wheel.text("vllm/config/attention.py")

    for name in (
        "decode_context_parallel_size: int", "prefill_context_parallel_size: int",
        "pipeline_parallel_size: int", "def use_ubatching(self) -> bool",
    ):  # fmt: skip
        assert name in parallel
    for name in ("enable_adaptive_verification: bool", "parallel_drafting: bool"):
        assert name in speculative
    assert "hisparse_config: HiSparseConfig | None" in attention
    assert "sparse_mla_force_mqa: bool" in attention
    assert "VLLM_BATCH_INVARIANT: bool" in wheel.text("vllm/envs.py")
    assert "def max_decode_query_len(vllm_config" in wheel.text(BACKEND)
    written = _body(wheel, COMMON, "SparseMLACommonMetadataBuilder.__init__")
    for name in ("vllm_config", "chunked_prefill_workspace_size", "_prefill_backend"):
        assert f"self.{name} = " in written or f"self.{name}: " in written
    assert "fp8_ds_mla" in wheel.text("vllm/model_executor/layers/attention/mla_attention.py")


def test_the_lengths_of_prefills_are_on_the_host(wheel: Wheel) -> None:
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for node in ast.walk(wheel.definition(BACKEND, "CommonAttentionMetadata"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }

    assert fields["query_start_loc_cpu"] == "torch.Tensor"
    assert fields["seq_lens_cpu_upper_bound"] == "torch.Tensor | None"
    assert fields["max_query_len"] == "int"
    assert {"causal", "mm_req_doc_ranges", "num_actual_tokens"} <= fields.keys()
    assert "for prefill rows" in wheel.text(BACKEND)


def test_ranks_share_the_indexers_rows_from_a_known_size_on(wheel: Wheel) -> None:
    text = wheel.text(INDEXER)
    if wheel.version == "0.31.0":
        assert "balanced_prefill_row_shard" not in text
    elif wheel.version == "0.32.0":
        assert "MIN_TP_SHARD_ROWS_PER_RANK = 16_384" in text
        assert "num_rows < MIN_TP_SHARD_ROWS_PER_RANK * tp_size" in text
    else:
        assert "num_rows < max(min_rows, tp_size)" in text
        assert "indexer_tp_shard_min_rows: int = Field(default=65536, ge=1)" in wheel.text(
            "vllm/config/attention.py"
        )


def test_the_groups_of_ranks_have_a_store(wheel: Wheel) -> None:
    text = wheel.text("vllm/distributed/parallel_state.py")

    assert "def get_tp_group() -> GroupCoordinator" in text
    for field in ("rank_in_group: int", "world_size: int", "cpu_group: ProcessGroup"):
        assert field in text


def test_each_flag_that_advice_may_name_exists(wheel: Wheel) -> None:
    text = wheel.text("vllm/engine/arg_utils.py") + wheel.text("vllm/config/attention.py")

    for flag in ("kv_cache_dtype", "tensor_parallel_size", "attention_backend", "backend",
                 "sparse_mla_force_mqa", "mla_prefill_backend"):  # fmt: skip
        assert f"{flag}:" in text, flag


@pytest.mark.parametrize("version", [*VERSIONS, "0.33.1", "0.32.0rc1", "0.31.2.post1"])
def test_known_versions_are_known(version: str) -> None:
    assert release_of(version) is not None


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "1.0.0", "0.3.3", "main", ""])
def test_other_versions_are_not(version: str) -> None:
    assert release_of(version) is None
