"""What the plug-in takes for granted of SGLang, read again in the wheels."""

from __future__ import annotations

import ast
from inspect import signature

import pytest

from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.hook_table import HOOKS
from nsa_tune.engines.sglang.releases import RELEASES, release_of
from tests.engines.sglang.wheels import BACKEND, MODES, VERSIONS, Wheel

_NEXT = ".".join(map(str, (*RELEASES[-1].last[:-1], RELEASES[-1].last[-1] + 1)))
"""The version after all that are known."""


def _method(wheel: Wheel, name: str) -> ast.FunctionDef:
    found = wheel.definition(BACKEND, f"DeepseekSparseAttnBackend.{name}")
    assert isinstance(found, ast.FunctionDef)
    return found


def test_each_hooked_symbol_is_there_with_its_signature(wheel: Wheel) -> None:
    for symbol in wheel.release.symbols:
        method = wheel.definition(symbol.module.replace(".", "/") + ".py", symbol.path)

        assert isinstance(method, ast.FunctionDef)
        arguments = (*method.args.args, *method.args.kwonlyargs)
        assert symbol.accepts(tuple(arg.arg for arg in arguments)), symbol


def test_a_hook_takes_its_arguments_by_name_too() -> None:
    """A release that the plug-in does not know may pass them so."""
    for symbol in RELEASES[-1].symbols:
        own = [None] * (symbol.arguments[0] == "self")
        named = dict.fromkeys(symbol.arguments[len(own) :])
        signature(HOOKS[symbol.name]).bind(None, *own, **named)


def test_every_call_passes_what_the_hooks_take(wheel: Wheel) -> None:
    calls = [node for node in ast.walk(wheel.tree(BACKEND)) if isinstance(node, ast.Call)]
    named = {node: node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
    prefill = [node for node, name in named.items() if name == "set_dsa_prefill_impl"]
    indexer = [
        node for node, name in named.items() if name == "_build_paged_mqa_schedule_2d_ctx_lens"
    ]

    assert prefill
    assert all({word.arg for word in node.keywords} <= {"forward_batch"} for node in prefill)
    assert all(len(node.args) + len(node.keywords) == 1 for node in prefill)
    assert indexer
    assert all(len(node.args) == 4 and not node.keywords for node in indexer)


def test_the_decision_is_taken_before_what_depends_on_it(wheel: Wheel) -> None:
    body = [ast.unparse(node) for node in _method(wheel, "init_forward_metadata").body]
    at = {
        text: min(i for i, line in enumerate(body) if text in line)
        for text in ("set_dsa_prefill_impl", "use_flashmla_kv =", "get_topk_transform_method")
    }

    assert at["set_dsa_prefill_impl"] < at["use_flashmla_kv ="]
    assert at["set_dsa_prefill_impl"] < at["get_topk_transform_method"]


def test_only_the_backend_itself_reads_its_prefill_implementation(wheel: Wheel) -> None:
    """A captured graph must hold nothing that depends on it."""
    readers = {
        name
        for name in wheel.names("sglang/srt/")
        if name.endswith(".py") and ".dsa_prefill_impl" in wheel.text(name)
    }

    assert readers == {BACKEND}


def test_each_implementation_has_a_branch_of_the_forward_pass(wheel: Wheel) -> None:
    body = ast.unparse(_method(wheel, "forward_extend"))
    impls = wheel.release.prefill_impls

    assert impls.keys() == {KVLayout.FP8_PACKED, KVLayout.BF16}
    for impl in frozenset().union(*impls.values()):
        kernel, _, union = impl.partition("_union")
        assert f"'{kernel}'" in body
        assert not union or "dsa_triton_union" in wheel.text(BACKEND)


def test_the_constructor_sets_all_that_is_read(wheel: Wheel) -> None:
    written = {
        target.attr
        for node in ast.walk(_method(wheel, "__init__"))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }

    assert {
        "use_mha", "dsa_prefill_impl", "dsa_kv_cache_store_fp8", "kv_cache_dim", "num_q_heads",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "dsa_index_topk", "num_splits",
        "hisparse_coordinator", "token_to_kv_pool", "speculative_num_draft_tokens",
    } <= written  # fmt: skip


def test_the_launch_arguments_that_are_read_are_there(wheel: Wheel) -> None:
    assert {"chunked_prefill_size", "dsa_paged_mqa_logits_backend"} <= dict(wheel.fields()).keys()


def test_a_forward_batch_has_its_lengths_on_the_host(wheel: Wheel) -> None:
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for node in ast.walk(wheel.definition(MODES, "ForwardBatch"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }

    assert fields["extend_prefix_lens_cpu"] == "Optional[List[int]]"
    assert fields["extend_seq_lens_cpu"] == "Optional[List[int]]"
    assert {"tbo_children", "tbo_parent_token_range"} <= fields.keys()


def test_a_draft_workers_seeds_are_known_to_be_converted_or_not(wheel: Wheel) -> None:
    """Offsets into a batch's own keys must not be copied where pool slots are meant."""
    assert "self.is_draft_worker = " in wheel.text("sglang/srt/model_executor/model_runner.py")
    workers = wheel.text("sglang/srt/speculative/eagle_worker_v2.py")
    assert "index_share_for_mtp_iteration" in workers
    converts = wheel.has(BACKEND, "DeepseekSparseAttnBackend.prepare_mtp_seed_indices")
    assert converts == (wheel.number >= (0, 5, 23))


def test_the_models_shape_is_where_it_is_looked_for(wheel: Wheel) -> None:
    config = wheel.text("sglang/srt/configs/model_config.py")

    assert "self.v_head_dim = self.hf_text_config.v_head_dim" in config
    assert "self.index_head_dim = (" in config
    assert "return config.index_n_heads" in config
    indexer = wheel.text("sglang/srt/layers/attention/dsa/dsa_indexer.py")
    assert "envs.SGLANG_DSA_TOPK_BROADCAST.get()" in indexer


def test_the_sparse_kernel_is_told_where_a_row_ends(wheel: Wheel) -> None:
    arguments = {one.arg for one in _method(wheel, "_forward_flashmla_sparse").args.args}

    assert "topk_length" in arguments


def test_the_size_up_to_which_a_prefill_is_a_graph_is_known(wheel: Wheel) -> None:
    hook = "sglang/srt/arg_groups/memory_hook.py"
    text = wheel.text("sglang/srt/server_args.py")
    text += wheel.text(hook) if wheel.names(hook) else ""
    expected = {
        (0, 5, 17): (2048, "prefill_cuda_graph_config.max_bs = 2048"),
        (0, 5, 23): (
            8192, "prefill_cuda_graph_config.max_bs = min(8192, cfg.chunked_prefill_size)",
        ),
    }  # fmt: skip
    tokens, line = expected[max(since for since in expected if since <= wheel.number)]

    assert wheel.release.graph_tokens == tokens
    assert line in text


def test_the_number_of_layers_is_where_it_is_looked_for(wheel: Wheel) -> None:
    folder = "sglang/srt/model_executor/"

    assert "self.layer_info" in wheel.text(f"{folder}model_runner.py")
    setup = wheel.text(f"{folder}model_runner_components/layer_setup.py")
    assert "    num_effective_layers: int\n" in setup


def test_what_flashmla_sparse_costs_once_a_pass_is_there(wheel: Wheel) -> None:
    body = ast.unparse(_method(wheel, "init_forward_metadata"))

    assert "torch.repeat_interleave(cu_seqlens_k[:-1], extend_seq_lens)" in body
    assert "== sum(indexer_seq_lens_cpu)" in body


def test_context_parallelism_can_be_asked_for(wheel: Wheel) -> None:
    text = wheel.text("sglang/srt/runtime_context.py")

    assert "def get_parallel(" in text
    assert "attn_cp_size" in text


def test_each_launch_argument_that_advice_may_name_exists(wheel: Wheel) -> None:
    fields = dict(wheel.fields())

    for name in ("chunked_prefill_size", "dsa_prefill_backend", "dsa_decode_backend",
                 "kv_cache_dtype"):  # fmt: skip
        assert name in fields


@pytest.mark.parametrize("version", [*VERSIONS, "0.5.17.post1", "0.5.20rc1", "0.5.18.dev3+g1a2b"])
def test_versions_within_the_range_are_known(version: str) -> None:
    assert release_of(version) is not None


@pytest.mark.parametrize("version", ["0.5.16", _NEXT, "0.6.0", "1.0.0", "main", ""])
def test_other_versions_are_not(version: str) -> None:
    assert release_of(version) is None
