"""Verify rows in SGLang's own buffers and metadata, whose code is the wheels'."""

from __future__ import annotations

import ast
import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.rows.verify import as_verify
from tests.engines.sglang.pass_mode.fakes import batch
from tests.engines.sglang.wheels import BACKEND, MODES, Wheel

_REGISTRY = "sglang/srt/model_executor/cuda_graph_buffer_registry.py"
_BUFFERS = "sglang/srt/model_executor/input_buffers.py"
_IMPORTED: dict[str, dict[str, Any]] = {
    "sglang.srt.model_executor.input_buffers": {"share_input_buffer": None},
    "sglang.srt.model_executor.forward_batch_info": {"compute_local_num_token_non_padded": None},
    "sglang.srt.environ": {
        "envs": SimpleNamespace(
            SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH=SimpleNamespace(get=lambda: False)
        )
    },
    "sglang.srt.runtime_context": {"get_parallel": None},
}  # fmt: skip
_TOPK, _PAGE, _CONTEXT = 2048, 64, 4096


def _registry(wheel: Wheel, monkeypatch: pytest.MonkeyPatch, requests: int, width: int) -> Any:
    """The buffers of decode graphs of so many requests."""
    for name, names in _IMPORTED.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    buffers = sys.modules["sglang.srt.model_executor.input_buffers"]
    vars(buffers)["INDEX_SEMANTIC_BUFFERS"] = _index_buffers(wheel)
    module = ModuleType("registry")
    monkeypatch.setitem(sys.modules, "registry", module)
    exec(compile(wheel.text(_REGISTRY), _REGISTRY, "exec"), vars(module))
    return module.build_decode_registry(
        device=torch.device("cpu"), max_bs=requests, max_num_token=requests * width,
        seq_len_fill_value=1, cache_loc_dtype=torch.int64, share_pool=False,
    )  # fmt: skip


def _index_buffers(wheel: Wheel) -> frozenset[str]:
    """The names of buffers whose padding SGLang sets to 0."""
    for node in wheel.tree(_BUFFERS).body:
        if ast.unparse(node).startswith("INDEX_SEMANTIC_BUFFERS"):
            texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            return frozenset(str(text) for text in texts)
    return frozenset()


def _metadata(wheel: Wheel, modes: Any, seq_lens: torch.Tensor, width: int) -> Any:
    """What SGLang makes of requests that have so many tokens before their rows."""
    names: dict[str, Any] = {
        "torch": torch, "is_cuda": lambda: False, "_is_hip": False,
        "DSAMetadata": lambda **fields: SimpleNamespace(**fields),
        "compute_cu_seqlens": lambda lens: torch.nn.functional.pad(lens.cumsum(0), (1, 0)),
        "compute_dsa_seqlens": lambda lens, dsa_index_topk, **_: lens.clamp(max=dsa_index_topk),
        "ForwardMode": modes,
    }  # fmt: skip
    method = wheel.compiled(
        BACKEND, "DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph", names
    )
    requests = len(seq_lens)
    tables = torch.zeros(requests * width, _CONTEXT // _PAGE, dtype=torch.int32)
    backend = _Backend()
    backend.speculative_num_draft_tokens = width
    backend.decode_cuda_graph_metadata = {"real_page_table": tables}
    method(
        backend, requests, requests * width, torch.zeros(requests, dtype=torch.int64), seq_lens,
        seq_lens, modes.TARGET_VERIFY, None,
    )  # fmt: skip
    return backend.forward_metadata


class _Backend:
    """Plain attributes; what is asked of the device is made up."""

    device = "cpu"
    dsa_index_topk = _TOPK
    dsa_decode_impl = "fa3"
    dsa_drop_wide_page_table = True
    dsa_index_kpool = 1
    real_page_size = physical_page_size = _PAGE
    forward_metadata: Any = None
    speculative_num_draft_tokens = 0
    decode_cuda_graph_metadata: Any = None
    req_to_token = torch.zeros(8, _CONTEXT, dtype=torch.int32)

    def set_dsa_prefill_impl(self, forward_batch: Any) -> None:
        """No prefill is under way."""

    def get_device_int32_arange(self, length: int) -> torch.Tensor:
        """0, 1, and so on."""
        return torch.arange(length, dtype=torch.int32)

    def _init_kpool_metadata_capture(self, metadata: Any, *rest: Any) -> Any:
        return metadata

    def _build_topk_v2_plan(self, seqlens_expanded: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("prefix_lens", "extend_lens"),
    [([0], [1]), ([0], [3]), ([64], [1]), ([100, 0, 7], [5, 2, 12]), ([3000], [33])],
)
def test_each_row_reads_the_keys_up_to_its_own_position(
    wheel: Wheel,
    prefix_lens: list[int],
    extend_lens: list[int],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = wheel.compiled(MODES, "ForwardMode", {"IntEnum": enum.IntEnum, "auto": enum.auto})
    extend = batch(prefix_lens, extend_lens, forward_mode=modes.EXTEND)
    rows = as_verify(extend, width)
    verify, requests = rows.forward_batch, rows.requests
    assert verify.forward_mode is modes.TARGET_VERIFY
    padded = requests + 3
    registry = _registry(wheel, monkeypatch, padded, width)
    registry.fill_from(
        verify, raw_bs=requests, padded_bs=padded, raw_num_tokens=requests * width,
        padded_num_tokens=padded * width,
    )  # fmt: skip

    def slot(name: str) -> torch.Tensor:
        found: torch.Tensor = registry.get_slot(name).slice_for(padded, padded * width)
        return found

    lens = _metadata(wheel, modes, slot("seq_lens"), width).dsa_seqlens_expanded
    new = [
        (i + 1, prefix + token, sum(extend_lens[:i]) + token)
        for i, (prefix, count) in enumerate(zip(prefix_lens, extend_lens, strict=True))
        for token in range(count)
    ]
    owners = slot("req_pool_indices").repeat_interleave(width)
    assert owners[rows.tokens].tolist() == [request for request, _, _ in new]
    assert lens[rows.tokens].tolist() == [position + 1 for _, position, _ in new]
    assert slot("positions")[rows.tokens].tolist() == [position for _, position, _ in new]
    for name in ("input_ids", "out_cache_loc"):
        expected = getattr(extend, name)[[at for _, _, at in new]]
        assert torch.equal(slot(name)[rows.tokens], expected)
    others = torch.ones(padded * width, dtype=torch.bool)
    others[rows.tokens] = False
    assert not slot("out_cache_loc")[others].any()
