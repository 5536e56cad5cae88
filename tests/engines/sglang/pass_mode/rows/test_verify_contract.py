"""What prefills by verify graphs take for granted of SGLang, read again in the wheels."""

from __future__ import annotations

import ast

from tests.engines.sglang.wheels import BACKEND, MODES, Wheel

_EXECUTOR = "sglang/srt/model_executor"
_DECODE = f"{_EXECUTOR}/runner/decode_cuda_graph_runner.py"
_PREFILL = f"{_EXECUTOR}/runner/prefill_cuda_graph_runner.py"
_WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
_COMMON = "sglang/srt/speculative/eagle_utils.py"
_GRAPHS = "DecodeCudaGraphRunner"
_DSA = "DeepseekSparseAttnBackend"


def _body(wheel: Wheel, file: str, path: str) -> str:
    return ast.unparse(wheel.definition(file, path))


def _metadata(wheel: Wheel) -> str:
    """The file of the kernel that writes a verify graph's metadata."""
    return next(
        name for name in wheel.names("sglang/kernels/ops/attention/")
        if "\ndef fused_dsa_target_verify_metadata(" in wheel.text(name)
    )  # fmt: skip


def test_graphs_of_a_speculative_engine_verify_so_many_rows_a_request(wheel: Wheel) -> None:
    written = _body(wheel, _DECODE, f"{_GRAPHS}.__init__")

    assert "self.capture_forward_mode = ForwardMode.TARGET_VERIFY" in written
    assert "self.captured_req_width = model_runner.decode_num_tokens_per_req(" in written
    load = _body(wheel, _DECODE, f"{_GRAPHS}.load_batch")
    assert "raw_num_token = raw_bs * self.captured_req_width" in load
    assert "bs = self._pad_to_bucket(raw_bs, self.capture_bs)" in load


def test_a_verify_pass_replays_a_graph(wheel: Wheel) -> None:
    assert "self == ForwardMode.TARGET_VERIFY" in _body(wheel, MODES, "ForwardMode.is_cuda_graph")
    # What drafts a batch has is looked at only where it has some.
    can_run = _body(wheel, _DECODE, f"{_GRAPHS}.can_run_graph")
    uses = [line for line in can_run.splitlines() if "spec_info" in line]
    assert uses[0].strip() == "spec_info = forward_batch.spec_info"
    assert all("spec_info is not None and" in line for line in uses[1:])


def test_verify_graphs_return_hidden_states_and_logits_of_all_rows(wheel: Wheel) -> None:
    spec_info = _body(wheel, _DECODE, f"{_GRAPHS}.get_spec_info").split("is_dflash_family")[0]
    assert "if self.model_runner.spec_algorithm.is_standalone() else CaptureHiddenMode.FULL" in (
        spec_info
    )
    prepared = _body(wheel, _DECODE, f"{_GRAPHS}.capture_prepare")
    assert "self.capture_hidden_mode = get_required_capture_hidden_mode(" in prepared
    execute = _body(wheel, _DECODE, f"{_GRAPHS}.execute")
    assert "output.next_token_logits[:self.raw_num_token]" in execute
    assert "output.hidden_states[:self.raw_num_token]" in execute
    fits = _body(wheel, _DECODE, f"{_GRAPHS}._validate_capture_hidden_mode")
    assert "if self.capture_hidden_mode < forward_batch.capture_hidden_mode:" in fits


def test_the_target_is_asked_for_the_same_states_in_prefill_and_verify(wheel: Wheel) -> None:
    """All of them, after the last norm."""
    full = "CaptureHiddenMode.NULL if {}.is_standalone() else CaptureHiddenMode.FULL"
    worker = wheel.text(_WORKER)
    name = "_forward_prefill_batch" if "def _forward_prefill_batch" in worker else None
    prefill = _body(wheel, _WORKER, f"EAGLEWorkerV2.{name or 'forward_batch_generation'}")
    assert full.format("self.speculative_algorithm") in prefill
    assert "capture_hidden_mode=target_capture_mode" in prefill
    verify = _body(wheel, _COMMON, "eagle_prepare_for_verify")
    assert full.format("target_worker.model_runner.spec_algorithm") in verify
    assert "return_hidden_states_before_norm=True" not in verify
    assert "return_hidden_states_before_norm=True" not in wheel.text(
        "sglang/srt/managers/tp_worker.py"
    )


def test_prefill_graphs_return_all_hidden_states_too(wheel: Wheel) -> None:
    """So dense graphs, which SGLang's own runner replays, need nothing of the plug-in."""
    written = _body(wheel, _PREFILL, "PrefillCudaGraphRunner.__init__")
    drafts, target = written.split("self.capture_hidden_mode = CaptureHiddenMode.LAST")

    assert drafts.splitlines()[-2].strip() in (
        "if is_breakable_eagle and model_runner.is_draft_worker:",
        "if is_breakable_eagle_draft:",
    )
    condition, mode = (line.strip() for line in target.splitlines()[1:3])
    assert condition.startswith(("elif is_breakable_eagle or", "elif is_eagle and"))
    assert mode == "self.capture_hidden_mode = CaptureHiddenMode.FULL"


def test_lengths_of_a_verify_batch_are_those_before_its_rows(wheel: Wheel) -> None:
    file = _metadata(wheel)
    kernel = _body(wheel, file, "_fused_dsa_target_verify_metadata_kernel")

    assert "cache_seq = seq.to(tl.int32) + next_n" in kernel
    assert "expanded_seq = base_seq + draft_off + 1" in kernel
    replay = _body(wheel, BACKEND, f"{_DSA}._apply_cuda_graph_metadata")
    verify = replay.split("elif forward_mode.is_target_verify():")[1]
    verify = verify.split("elif forward_mode.is_draft_extend_v2():")[0]
    assert "next_n=self.speculative_num_draft_tokens" in verify
    assert "cache_seqlens = (seq_lens + self.speculative_num_draft_tokens)" in verify


def test_a_rows_keys_are_a_chain_whatever_drafts_a_batch_has(wheel: Wheel) -> None:
    """No mask: what a verify graph of DSA reads follows from lengths and page tables alone."""
    kept = {
        line.strip()
        for name in ("_apply_cuda_graph_metadata", "init_forward_metadata_out_graph")
        for line in _body(wheel, BACKEND, f"{_DSA}.{name}").splitlines()
        if "spec_info" in line and not line.strip().startswith("def ")
    }

    assert "custom_mask" not in wheel.text(BACKEND)
    handed_on = (
        "self._build_forward_metadata_cuda_graph(",
        "self._apply_cuda_graph_metadata(",
        # Of the draft layer's passes.
        "if forward_mode.is_draft_extend_v2() and spec_info is not None:",
        "effective_n_per_batch = getattr(spec_info",
    )
    assert all(line.startswith(handed_on) for line in kept)


def test_sglang_itself_refuses_trees_of_draft_tokens(wheel: Wheel) -> None:
    """With pages of more than one token, as DSA's pool has."""
    hook = wheel.text("sglang/srt/arg_groups/speculative_hook.py")

    assert '_PAGE_TREE_SPEC_BACKENDS = ("flashinfer", "fa3", "triton")\n' in hook
    assert "view.attention_backend not in _PAGE_TREE_SPEC_BACKENDS" in hook


def test_what_tells_kinds_of_speculation_apart_is_there(wheel: Wheel) -> None:
    assert {"speculative_adaptive", "enable_multi_layer_eagle"} <= dict(wheel.fields()).keys()
    backend = _body(wheel, BACKEND, f"{_DSA}.__init__")
    assert "self.topk = " in backend
    assert "self.speculative_num_draft_tokens = " in backend
    kinds = _body(wheel, "sglang/srt/speculative/spec_info.py", "SpeculativeAlgorithm")
    assert "\n    EAGLE = auto()\n" in kinds
    assert "def is_eagle(self)" in kinds
    hook = wheel.text("sglang/srt/arg_groups/speculative_hook.py")
    assert 'speculative_algorithm == "NEXTN" or speculative_algorithm == "EAGLE"' in hook
    environ = wheel.text("sglang/srt/environ.py")
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM = EnvBool(False)" in environ


def test_the_first_page_of_the_pool_is_nobodys(wheel: Wheel) -> None:
    """Rows that are left out write there."""
    allocator = "sglang/srt/mem_cache/allocator/paged.py"
    cleared = _body(wheel, allocator, "PagedTokenToKVPoolAllocator.clear")

    assert "self.free_pages = torch.arange(1, self.num_pages + 1" in cleared
