"""What the plug-in takes for granted of SGLang's V4, read again in the wheels."""

from __future__ import annotations

import ast

from tests.engines.sglang.wheels import MODES, V4_BACKEND, Wheel

_CLASS = "DeepseekV4AttnBackend"
_POOL = "sglang/srt/mem_cache/deepseek_v4_memory_pool.py"
_SPARSE = "sglang/srt/layers/attention/dsv4/sparse_prefill_utils.py"


def _method(wheel: Wheel, name: str) -> ast.FunctionDef:
    found = wheel.definition(V4_BACKEND, f"{_CLASS}.{name}")
    assert isinstance(found, ast.FunctionDef)
    return found


def _attributes(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The attributes of `self` that are read or written within `node`."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, context)
        and ast.unparse(one.value) == "self"
    }


def _functions_with(wheel: Wheel, attribute: str) -> set[str]:
    """The methods of the backend that name an attribute of whatever."""
    return {
        method.name
        for method in wheel.definition(V4_BACKEND, _CLASS).body
        if isinstance(method, ast.FunctionDef)
        and any(
            isinstance(one, ast.Attribute) and one.attr == attribute for one in ast.walk(method)
        )
    }


def test_older_releases_have_the_switch_within_a_method(wheel: Wheel) -> None:
    own = wheel.has(V4_BACKEND, f"{_CLASS}._use_sparse_prefill")
    readers = _functions_with(wheel, "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL")

    assert own == (wheel.version == "0.5.23")
    assert readers == ({"_use_sparse_prefill"} if own else {"forward"})


def test_the_switch_takes_its_number_of_rows_by_name(newest: Wheel) -> None:
    method = _method(newest, "_use_sparse_prefill")

    assert [arg.arg for arg in method.args.args] == ["self", "forward_batch"]
    assert [arg.arg for arg in method.args.kwonlyargs] == ["num_qo_tokens"]
    assert not method.args.defaults
    assert method.args.kw_defaults == [None]


def test_every_call_passes_what_the_hook_takes(newest: Wheel) -> None:
    calls = [
        node
        for node in ast.walk(newest.tree(V4_BACKEND))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_use_sparse_prefill"
    ]

    assert len(calls) == 3
    for call in calls:
        assert [ast.unparse(one) for one in call.args] == ["forward_batch"]
        assert [one.arg for one in call.keywords] == ["num_qo_tokens"]


def test_nobody_else_asks_it_or_decides_by_its_variable(newest: Wheel) -> None:
    """What hangs upon the switch is what v4.py says."""
    assert _functions_with(newest, "_use_sparse_prefill") == {
        "_snapshot_prefill_shared_reads",  # before the first layer
        "_low_ratio_prefill_reads_page_indices",  # V4.1
        "_forward_attention",  # in each layer
    }
    texts = {
        name: newest.text(name) for name in newest.names("sglang/srt/") if name.endswith(".py")
    }
    asking = {name for name, text in texts.items() if "_use_sparse_prefill" in text}
    assert asking == {V4_BACKEND}
    variable = "envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get("
    assert {name for name, text in texts.items() if variable in text} == {V4_BACKEND}


def test_what_the_sparse_way_prepares_is_read_by_the_sparse_way_alone(newest: Wheel) -> None:
    sparse = {"_forward_prefill_sparse", "_forward_prefill_sparse_q8kv8"}

    assert _functions_with(newest, "sparse_prefill_cache") == {
        *sparse, "_snapshot_prefill_shared_reads",
    }  # fmt: skip
    assert _functions_with(newest, "sparse_prefill_kv_buffer") == {
        *sparse, "_build_sparse_prefill_chunk_cache", "__init__",
    }  # fmt: skip
    for name in sparse:
        assert "if cache is None:" in ast.unparse(_method(newest, name))


def test_a_pass_without_the_sparse_way_reads_nothing_late(newest: Wheel) -> None:
    """The engine's own words, and its own return value."""
    body = _method(newest, "_snapshot_prefill_shared_reads").body
    choice, last = body[-2:]

    assert isinstance(choice, ast.If)
    assert "_use_sparse_prefill" in ast.unparse(choice.test)
    assert not choice.orelse
    assert ast.unparse(last) == "return SharedReadEnds.PRE_REPLAY"
    assert "Dense prefill builds no cache" in newest.text(V4_BACKEND)


def test_what_the_paged_way_reads_is_made_without_asking(newest: Wheel) -> None:
    related = newest.definition(V4_BACKEND, "DSV4AttnMetadata.init_flashmla_related")
    made = _attributes(related, ast.Store)

    assert {"c0_flashmla_metadata", "c4_flashmla_metadata", "c128_flashmla_metadata"} <= made
    assert {"c4_sparse_page_indices", "c4_sparse_raw_indices"} <= made
    assert "sparse_prefill" not in ast.unparse(related)
    indexer = newest.text("sglang/srt/layers/attention/dsv4/indexer.py")
    assert "sparse_prefill" not in indexer.lower()


def test_the_constructor_sets_all_that_is_read(newest: Wheel) -> None:
    kind = newest.definition(V4_BACKEND, _CLASS)
    written = _attributes(_method(newest, "__init__"), ast.Store)
    written |= {
        one.target.id
        for one in kind.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }

    assert {
        "trtllm_attn", "mega_attn", "is_dsv41", "low_ratios", "present_ratios", "is_draft_runner",
        "hisparse_coordinator", "enable_decoder_swa_bounded_replay", "dsv4_prefill_backend",
        "index_topk", "page_size", "token_to_kv_pool",
    } <= written  # fmt: skip


def test_the_pool_has_what_is_read(newest: Wheel) -> None:
    kind = "DeepSeekV4TokenToKVPool"
    written = _attributes(newest.definition(_POOL, f"{kind}.__init__"), ast.Store)

    assert {"compression_ratios", "request_window", "kv_layout"} <= written
    assert newest.has(_POOL, f"{kind}.get_swa_key_layout")
    assert newest.has(_POOL, f"{kind}.compressed_kv_layout")
    layouts = newest.definition("sglang/kernels/ops/attention/dsv4/kv_layout.py", "KVLayout")
    assert "V4 = 'v4'" in ast.unparse(layouts)
    assert "V4: 576" in ast.unparse(layouts)
    setup = newest.text("sglang/srt/model_executor/model_runner_components/layer_setup.py")
    assert "    start_layer: int\n    end_layer: int\n" in setup


def test_a_draft_layer_has_the_window_alone(newest: Wheel) -> None:
    assert "COMPRESS_RATIO_NEXTN_LAYER = 0\n" in newest.text(
        "sglang/srt/models/deepseek_v4_nextn.py"
    )


def test_the_models_shape_is_where_it_is_looked_for(newest: Wheel) -> None:
    config = newest.text("sglang/srt/configs/model_config.py")

    for line in (
        "self.qk_nope_head_dim = self.hf_config.head_dim - self.qk_rope_head_dim",
        "self.window_size = self.hf_config.sliding_window",
        "self.index_head_dim = self.hf_config.index_head_dim",
        "self.num_attention_heads = getattr(",
    ):
        assert line in config
    assert "index_n_heads: int" in newest.text("sglang/srt/configs/deepseek_v4.py")


def test_the_modes_of_operation_can_be_asked_for(newest: Wheel) -> None:
    runtime = newest.text("sglang/srt/runtime_context.py")
    graphs = newest.text("sglang/srt/model_executor/cuda_graph_config.py")

    assert all(name in runtime for name in ("attn_tp_size", "attn_cp_size", "attn_dcp_size"))
    assert "get_exec().graph.cuda_graph_config" in graphs
    assert 'DISABLED = "disabled"' in graphs
    assert newest.has(_SPARSE, "use_dsv4_q8kv8_sparse_prefill")
    assert "enable_deterministic_inference" in dict(newest.fields())
    assert "DeepSeek-V4 (heavy capture-pool memory pressure)" in newest.text(
        "sglang/srt/arg_groups/cuda_graph_hook.py"
    )


def test_a_forward_batch_takes_weak_references(newest: Wheel) -> None:
    kind = newest.definition(MODES, "ForwardBatch")

    assert isinstance(kind, ast.ClassDef)
    assert [ast.unparse(one) for one in kind.decorator_list] == ["dataclass"]
    assert "__slots__" not in ast.unparse(kind)


def test_before_the_first_layer_and_in_it_the_batch_is_the_same(newest: Wheel) -> None:
    runner = newest.text("sglang/srt/model_executor/runner/eager_runner.py")
    asked = runner.index("resolve_prefill_shared_read_ends(\n                    forward_batch,")
    ran = runner.index("ret = model_runner.model.forward(", asked)

    assert "forward_batch = " not in runner[asked:ran]
