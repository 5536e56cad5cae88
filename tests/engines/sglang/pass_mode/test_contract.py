"""What steering whole passes takes for granted of SGLang, read again in the wheels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nsa_tune.engines.sglang.pass_mode.rows import graphs as row_graphs
from nsa_tune.engines.sglang.pass_mode.rows import rows
from nsa_tune.engines.sglang.pass_mode.start import _ARGUMENTS
from nsa_tune.engines.sglang.pass_mode.steering import choice
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_attention import IndexerMetadata
from tests.engines.sglang.wheels import BACKEND, MODES, Wheel

_EXECUTOR = "sglang/srt/model_executor"
_RUNNER = f"{_EXECUTOR}/model_runner.py"
_PREFILL = f"{_EXECUTOR}/runner/prefill_cuda_graph_runner.py"
_DECODE = f"{_EXECUTOR}/runner/decode_cuda_graph_runner.py"
_BASE = (f"{_EXECUTOR}/runner/base_runner.py", f"{_EXECUTOR}/runner/base_cuda_graph_runner.py")
_BREAKABLE = f"{_EXECUTOR}/runner_backend/breakable_cuda_graph_backend.py"
_FULL = f"{_EXECUTOR}/runner_backend/full_cuda_graph_backend.py"
_BREAKS = f"{_EXECUTOR}/runner_backend_utils/breakable_cuda_graph/breakable_cuda_graph.py"
_SHAPE_KEY = f"{_EXECUTOR}/runner/shape_key.py"
_METHODS = "sglang/srt/models/deepseek_common/attention_backend_handler.py"
_MHA = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mha.py"
_MODEL = "sglang/srt/models/deepseek_v2.py"
_SPLIT = "sglang/srt/layers/attention/dsa/dsa_prefill_cuda_graph.py"
_INDEXER = "sglang/srt/layers/attention/dsa/dsa_indexer.py"
_GROUPS = "sglang/srt/distributed/parallel_state.py"
_CONTEXT = "sglang/srt/runtime_context.py"
_GRAPHS = "PrefillCudaGraphRunner"
_HOOKS = {
    "init_graphs", "forward", "can_run", "capture", "capture_decode", "prepare_metadata", "extend",
    "k_only", "replay",
}  # fmt: skip


def _body(wheel: Wheel, file: str, path: str) -> str:
    return ast.unparse(wheel.definition(file, path))


def _arguments(wheel: Wheel, file: str, path: str) -> list[str]:
    method = wheel.definition(file, path)
    assert isinstance(method, ast.FunctionDef)
    return [one.arg for one in method.args.args]


def _fields(wheel: Wheel, file: str, name: str) -> set[str]:
    return {
        node.target.id
        for node in wheel.definition(file, name).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _calls(wheel: Wheel, file: str, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(wheel.tree(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
            yield node


def _first_statement(wheel: Wheel, file: str, path: str) -> str:
    """The first statement of a function, its docstring aside."""
    body = wheel.definition(file, path).body
    return ast.unparse(body[1] if ast.get_docstring(wheel.definition(file, path)) else body[0])


def test_a_release_has_all_hooks(wheel: Wheel) -> None:
    assert {symbol.name for symbol in wheel.release.symbols} >= _HOOKS


def test_a_decode_batch_runs_through_the_decode_graphs_before_anything_else(
    wheel: Wheel,
) -> None:
    body = _body(wheel, _RUNNER, "ModelRunner._forward_raw")
    decode = body.index("self.decode_cuda_graph_runner.execute(forward_batch")

    assert "self.decode_cuda_graph_runner.can_run_graph(forward_batch)" in body[:decode]
    assert decode < body.index("self._prepare_eager_forward_batch(forward_batch)")
    assert decode < body.index("self.prefill_cuda_graph_runner.can_run_graph(forward_batch)")
    # It leaves with what the graph has computed.
    assert body[decode:].split("\n")[1].strip().startswith("return ModelRunnerOutput(")


def test_a_pass_is_called_without_keywords(wheel: Wheel) -> None:
    calls = list(_calls(wheel, _RUNNER, "_forward_raw"))

    assert calls
    assert all(not call.keywords for call in calls)


def test_metadata_and_replay_are_called_as_the_hooks_take_them(wheel: Wheel) -> None:
    prepare = list(_calls(wheel, _PREFILL, "_prepare_forward_metadata_for_replay"))
    replay = [
        call
        for call in _calls(wheel, _PREFILL, "replay")
        if ast.unparse(call.func) == "self.backend.replay"
    ]

    assert prepare
    assert all(len(call.args) == 3 and not call.keywords for call in prepare)
    assert replay
    for call in replay:
        assert len(call.args) == 2
        assert all(word.arg is None for word in call.keywords)  # **kwargs


def test_what_preparing_returns_may_be_none(wheel: Wheel) -> None:
    """A dense graph's hook prepares nothing of SGLang's and returns nothing."""
    body = _body(wheel, _PREFILL, f"{_GRAPHS}.load_batch")
    shared = f"{_EXECUTOR}/runner_utils/shared_read_event.py"
    if "shared_read_ends = self._prepare_forward_metadata_for_replay(" not in body:
        assert "\n    self._prepare_forward_metadata_for_replay(" in body
        return
    publish = _first_statement(wheel, shared, "maybe_publish_prefill_shared_read_done")
    assert publish == "if shared_read_ends is not SharedReadEnds.PRE_REPLAY:\n    return"
    execute = _body(wheel, _PREFILL, f"{_GRAPHS}.execute")
    assert execute.count("shared_read_ends") == 2  # unpacked, and passed on to that


def test_the_prefill_graph_runner_can_capture_more_graphs(wheel: Wheel) -> None:
    assert _arguments(wheel, _PREFILL, f"{_GRAPHS}.capture_prepare") == ["self", "num_tokens"]
    prepared = _body(wheel, _PREFILL, f"{_GRAPHS}.capture_prepare")
    assert prepared.endswith("return (forward_batch, self.model_runner.attn_backend)")
    run = ["self", "forward_batch", "num_tokens"]
    assert _arguments(wheel, _PREFILL, f"{_GRAPHS}._run_forward") == run
    written = _body(wheel, _PREFILL, f"{_GRAPHS}.__init__")
    assert "self.capture_num_tokens = " in written
    # Replaced while a whole-pass graph runs, it says what a batch is padded to.
    padded = _body(wheel, _PREFILL, f"{_GRAPHS}.load_batch")
    assert "static_num_tokens = self._pad_to_bucket(num_tokens, self.capture_num_tokens)" in padded
    assert "self.backend = resolve_prefill_backend(self)" in written
    base = "".join(wheel.text(name) for name in _BASE)
    assert "self.device = " in base
    assert "self.model_runner = " in base


def test_all_graphs_are_captured_in_one_session(wheel: Wheel) -> None:
    """What the capture hook adds is captured like SGLang's own."""
    calls = list(_calls(wheel, _PREFILL, "_capture_one_stream"))
    assert len(calls) == 1
    within = [
        node
        for node in ast.walk(wheel.tree(_PREFILL))
        if isinstance(node, ast.With)
        and "self.backend.capture_session(" in ast.unparse(node.items[0])
    ]
    assert [ast.unparse(node.body[0]) for node in within] == ["self._capture_one_stream()"]
    if wheel.number >= (0, 5, 23):
        capture = _body(wheel, _PREFILL, f"{_GRAPHS}.capture")
        assert "with self.model_context():\n        self._capture()" in capture
        execute = _body(wheel, _PREFILL, f"{_GRAPHS}.execute")
        assert "with self.model_context(), self.backend.replay_session():" in execute


def test_a_graph_is_kept_and_found_by_its_key(wheel: Wheel) -> None:
    full = _body(wheel, _FULL, "FullCudaGraphBackend.capture_one")
    assert re.search(r"for \w+ in range\(2\):", full)
    assert full.count("forward_fn()") == 2
    assert "self._graphs[shape_key] = graph" in full
    capture = wheel.definition(_BREAKABLE, "BreakableCudaGraphBackend.capture_one")
    assert isinstance(capture, ast.FunctionDef)
    names = [one.arg for one in capture.args.args]
    assert names[:3] == ["self", "shape_key", "forward_fn"]
    assert len(capture.args.defaults) == len(names) - 3  # the others need not be given
    body = ast.unparse(capture)
    assert "self._graphs[shape_key] = graph" in body
    assert "size = shape_key.size" in body
    assert "pool=self._pool" in body
    replay = _body(wheel, _BREAKABLE, "BreakableCudaGraphBackend.replay")
    assert "self._graphs[shape_key].replay()" in replay
    assert "return self._outputs[shape_key]" in replay


def test_of_the_runs_before_a_capture_only_the_outputs_shape_is_used(wheel: Wheel) -> None:
    """So the second of them may be left out."""
    full = _body(wheel, _FULL, "FullCudaGraphBackend.capture_one")
    assert re.search(r"for \w+ in range\(2\):", full)
    assert full.count("forward_fn()") == 2
    assert "self._graphs[shape_key] = graph" in full
    capture = wheel.definition(_BREAKABLE, "BreakableCudaGraphBackend.capture_one")
    body = ast.unparse(capture)
    assert "for _ in range(2):" in body
    calls = [node for node in ast.walk(capture) if isinstance(node, ast.Call)]
    readers = {
        ast.unparse(call.func)
        for call in calls
        if any(isinstance(given, ast.Name) and given.id == "warmup_out" for given in call.args)
    }
    assert "self._alloc_full_buffer" in readers
    assert readers <= {
        "self._alloc_full_buffer", "self._output_rows",
        "self._cuda_graph_runner.cuda_graph_output_capacity_rows",
    }  # fmt: skip


def test_a_pass_runs_as_far_as_its_model_says(wheel: Wheel) -> None:
    forward = _body(wheel, _MODEL, "DeepseekV2Model.forward")
    assert "normal_end_layer = self.end_layer" in forward
    assert "for i in range(normal_start_layer, normal_end_layer):" in forward
    assert "self.layer_model.forward(" in _body(wheel, _PREFILL, f"{_GRAPHS}._run_forward")


def test_a_shape_key_is_a_size_and_a_label(wheel: Wheel) -> None:
    key = wheel.definition(_SHAPE_KEY, "ShapeKey")
    assert isinstance(key, ast.ClassDef)

    assert {"size", "variant_label"} <= _fields(wheel, _SHAPE_KEY, "ShapeKey")
    assert "frozen=True" in ast.unparse(key.decorator_list[0])


def test_sglangs_own_prefill_graphs_do_not_bear_the_label(wheel: Wheel) -> None:
    assert "nsa_tune" not in wheel.text(_PREFILL)
    # Only graphs with a prefix in chunks bear one, and these are not of the breakable kind.
    assert "self._is_full_backend and" in wheel.text(_PREFILL)


def test_without_a_current_capture_nothing_breaks(wheel: Wheel) -> None:
    wrapper = _body(wheel, _BREAKS, "eager_on_graph")

    assert "capture = _current_capture_var.get()\n" in wrapper
    assert "if capture is None:\n" in wrapper
    assert "return inner(*args, **kwargs)" in wrapper
    assert "_current_capture_var: ContextVar[" in wheel.text(_BREAKS)


def test_attention_of_a_dense_graph_reads_what_is_replaced(wheel: Wheel) -> None:
    assert "backend.use_mha" in _body(wheel, _METHODS, "handle_attention_dsa")
    mha = _body(wheel, BACKEND, "DeepseekSparseAttnBackend._forward_standard_mha")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seq_len_q", "max_seq_len_k")
    for name in names:
        assert f"metadata.{name}" in mha
    assert set(names) <= _fields(wheel, BACKEND, "DSAMetadata")
    metadata = wheel.definition(BACKEND, "DSAMetadata")
    assert isinstance(metadata, ast.ClassDef)
    assert "dataclass" in ast.unparse(metadata.decorator_list[0])
    read = {
        node.attr
        for node in ast.walk(ast.parse(mha))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "metadata"
    }
    # Blackwell's branch reads more, so there are no dense graphs there.
    assert read == {*names, "cache_seqlens_int32"}
    blackwell, hopper = mha.split("return flash_attn_varlen_func(")
    assert "self.device_sm_major >= 10" in blackwell
    assert "metadata.cache_seqlens_int32" in blackwell
    assert "seq_lens=" not in hopper.replace("seqlens", "")


def test_where_attention_is_dense_the_indexer_only_stores_its_keys(wheel: Wheel) -> None:
    mha = wheel.text(_MHA)
    split = _body(wheel, _SPLIT, "pcg_dsa_indexer_prefill_split")

    assert "return_indices=seed_buf is not None" in mha
    assert "return_indices = topk_result.numel() != 0" in split
    assert "k_only = not return_indices or" in split


def test_the_indexer_asks_only_for_metadata_that_sparse_graphs_have(wheel: Wheel) -> None:
    split = _body(wheel, _SPLIT, "pcg_dsa_indexer_prefill_split")
    assert "metadata = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)" in split
    body = wheel.definition(_INDEXER, "Indexer._get_topk_ragged")
    asked = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "metadata"
    }
    # The table of single tokens is for another GPU.
    assert asked - {"get_page_table_1"} <= {*dir(IndexerMetadata), "attn_metadata"}
    within = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "metadata.attn_metadata"
    }
    assert within == {"topk_indices_offset"}
    # With an offset a row, its chunks of rows gather nothing else.
    text = ast.unparse(body)
    assert "topk_offset_chunk = global_topk_offset[start:end]" in text
    assert "topk_indices_offset_override=topk_offset_chunk" in text


def test_metadata_is_what_the_last_preparation_left(wheel: Wheel) -> None:
    """Nothing but preparing it writes metadata, so that a dense graph may leave it alone."""
    text = wheel.text(BACKEND)
    assert "self.forward_metadata = metadata" in text
    assert "metadata = self.forward_metadata" in text


def test_decode_graphs_are_those_of_one_row_a_sequence(wheel: Wheel) -> None:
    assert "self.capture_bs" in wheel.text(_DECODE)
    execute = wheel.text(_DECODE)
    assert "next_token_logits" in execute
    assert "[: self.raw_num_token]" in execute


def test_sglang_rather_runs_eagerly_than_pad_too_much(wheel: Wheel) -> None:
    line = f"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR = {choice._MOST_PADDING}\n"
    assert line in wheel.text(_PREFILL)
    local = _body(wheel, _PREFILL, f"{_GRAPHS}.can_replay_locally")
    assert "padded_num_tokens > num_tokens * _MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR" in local


def test_a_forward_batch_has_the_fields_that_are_set_and_read(wheel: Wheel) -> None:
    fields = _fields(wheel, MODES, "ForwardBatch")

    assert {
        *rows._PER_ROW, *rows._PER_REQUEST, *rows._EXTEND_ONLY,
        "forward_mode", "global_forward_mode",
        "batch_size", "seq_lens_sum", "capture_hidden_mode", "return_logprob", "mm_inputs",
        "return_pooled_hidden_states", "input_embeds", "replace_embeds", "spec_info",
        "global_num_tokens_cpu", "multi_item_delimiter_indices", "rids_int",
    } <= fields  # fmt: skip
    count = {"num_token_non_padded_cpu", "global_num_token_non_padded_cpu"} & fields
    assert len(count) == 1


def test_no_other_field_of_a_value_a_row_reaches_decode_graphs(wheel: Wheel) -> None:
    """The registry copies rows of these into the graph's buffers; all others have no row."""
    registry = f"{_EXECUTOR}/cuda_graph_buffer_registry.py"
    build = wheel.definition(registry, "build_decode_registry")
    slots = {
        node.value for node in ast.walk(build)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and node.value in _fields(wheel, MODES, "ForwardBatch")
    }  # fmt: skip

    assert slots <= {
        "input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu",
        # One number a pass, or for other models than those that are wheel.
        "num_token_non_padded", "global_num_token_non_padded", "global_num_tokens_gpu",
        "global_num_tokens_for_logprob_gpu", "mrope_positions", "encoder_lens",
        "mamba_track_indices", "mamba_track_mask", "ngram_embedding_info",
        # Only where passes with them are no rows.
        "rids_int", "bootstrap_room_ids_int",
    }  # fmt: skip
    assert "rids_int" in row_graphs._OF_SEQUENCES


def test_sparse_attention_reads_requests_pages_from_their_table_alone(wheel: Wheel) -> None:
    """A row names its request twice: nothing else may map a batch's rows to pages."""
    text = wheel.text(BACKEND)

    assert "req_to_token" in text
    assert "kv_loc_plan" not in text
    assert "kv_index_translator" not in text


def test_the_ranks_are_where_they_are_looked_for(wheel: Wheel) -> None:
    on_runner = "self.tp_group = " in wheel.text(_RUNNER)
    if not on_runner:
        assert '"tp_group"' in wheel.text(_CONTEXT)
    group = wheel.definition(_GROUPS, "GroupCoordinator")
    assert {"rank_in_group", "world_size"} <= _fields(wheel, _GROUPS, "GroupCoordinator")
    assert group is not None
    broadcast = _arguments(wheel, _GROUPS, "GroupCoordinator.broadcast_object")
    assert broadcast[:3] == ["self", "obj", "src"]
    assert _arguments(wheel, _GROUPS, "GroupCoordinator.all_gather_object") == ["self", "obj"]


def test_dp_attention_is_seen(wheel: Wheel) -> None:
    assert "attn_dp_size" in wheel.text(_CONTEXT)
    hook = "sglang/srt/arg_groups/parallel_hook.py"
    taken_back = wheel.names(hook) and "enable_dp_attention=False" in wheel.text(hook)
    assert bool(taken_back) == (wheel.number >= (0, 5, 23))


def test_what_leaves_a_runner_alone_is_there(wheel: Wheel) -> None:
    assert {
        "enable_dp_attention", "pp_size", "moe_a2a_backend", "enable_lora", "tp_size",
        "enable_two_batch_overlap", "enable_pdmux", "enable_return_routed_experts",
        "enable_unified_memory",
        "enable_return_indexer_topk", "debug_cuda_graph", *_ARGUMENTS,
    } <= dict(wheel.fields()).keys()  # fmt: skip
    runner = wheel.text(_RUNNER)
    for name in (
        "server_args", "is_draft_worker", "spec_algorithm", "is_generation", "model_config",
        "max_total_num_tokens", "req_to_token_pool", "decode_cuda_graph_runner",
        "prefill_cuda_graph_runner",
    ):  # fmt: skip
        assert f"self.{name} = " in runner, name
    assert "self.device_sm_major = " in wheel.text(BACKEND)
    assert "self.dsa_decode_impl" in wheel.text(BACKEND)
    environ = wheel.text("sglang/srt/environ.py")
    assert "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD" in environ


def test_weights_may_come_after_graphs_from_0_5_18_on(wheel: Wheel) -> None:
    """Until then they are sentinels, over which no pass takes what it will."""
    assert ("startup_weight_load_mode" in dict(wheel.fields())) == (wheel.number >= (0, 5, 18))
    if wheel.number >= (0, 5, 23):
        start = _body(wheel, "sglang/srt/managers/scheduler.py", "Scheduler.init_model_worker")
        capture, finalize = "self.init_all_cuda_graphs()", "finalize_startup_weight_load()"
        assert -1 < start.find(capture) < start.find(finalize)
