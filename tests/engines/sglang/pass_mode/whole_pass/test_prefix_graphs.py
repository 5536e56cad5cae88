"""Graphs of dense MLA over prefixes: what is captured, which batches fit, and what is written."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.whole_pass import prefix_graphs as module
from nsa_tune.engines.sglang.pass_mode.whole_pass.prefix_graphs import SEQUENCES, PrefixGraphs
from tests.engines.sglang.wheels import Wheel

_COMMON = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mha.py"
_MIXIN = "sglang/srt/model_executor/forward_batch_deepseek_mha_mixin.py"
SIZES = [128, 512, 1024]


@dataclass
class _Metadata:
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seq_len_q: int = 0
    max_seq_len_k: int = 0


class _Backend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = _Metadata()


class _Runner:
    """SGLang's PrefillCudaGraphRunner over page tables of which each entry is its place."""

    def __init__(self, context_len: int = 163840) -> None:
        self.capture_num_tokens, self.device = SIZES, "cpu"
        table = torch.arange(4 * 40000, dtype=torch.int32).view(4, 40000)
        self.model_runner = SimpleNamespace(
            attn_backend=_Backend(),
            model_config=SimpleNamespace(
                context_len=context_len, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )
        self.ran: list[tuple[Any, int, Any]] = []

    def capture_prepare(self, size: int) -> tuple[Any, Any]:
        batch = SimpleNamespace(batch_size=1, extend_prefix_lens_cpu=[0])
        return batch, self.model_runner.attn_backend

    def _run_forward(self, forward_batch: Any, size: int) -> None:
        backend = self.model_runner.attn_backend
        assert backend.use_mha
        self.ran.append((forward_batch, size, backend.forward_metadata))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> _Runner:
    made = _Runner()
    made.keys = []  # type: ignore[attr-defined]

    def capture(runner: Any, key: Any, forward: Callable[[], Any]) -> None:
        runner.keys.append(key)
        forward()

    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "shape_key", lambda size, kind: (size, kind))
    return made


def _captured(runner: _Runner) -> PrefixGraphs:
    graphs = PrefixGraphs(runner)
    for size in graphs.wanted():
        graphs.capture(size)
    return graphs


def _served(prefix_lens: list[int], extend_lens: list[int]) -> Any:
    return SimpleNamespace(
        extend_prefix_lens_cpu=prefix_lens, extend_seq_lens_cpu=extend_lens,
        req_pool_indices=torch.arange(1, len(extend_lens) + 1),
    )  # fmt: skip


def test_each_size_is_captured_with_room_for_two_prefixes(runner: _Runner) -> None:
    graphs = _captured(runner)

    assert graphs.sizes == [512, 1024]
    assert runner.keys == [  # type: ignore[attr-defined]
        (size, f"nsa_tune_prefix_{room}") for size in (512, 1024) for room in (8192, 32768)
    ]
    assert not runner.model_runner.attn_backend.use_mha
    for (batch, size, metadata), room in zip(runner.ran, (8192, 32768) * 2, strict=True):
        assert batch.extend_prefix_lens_cpu == [room]
        assert len(batch.mha_one_shot_kv_indices) == size + room
        assert (metadata.max_seq_len_q, metadata.max_seq_len_k) == (size, size + room)


def test_batches_behind_a_prefix_fit_as_far_as_there_is_room(runner: _Runner) -> None:
    graphs = _captured(runner)

    assert graphs.fits(512, Batch.extend([32768], [400]))
    assert not graphs.fits(512, Batch.extend([32769], [400]))
    assert not graphs.fits(512, Batch.extend([0], [400]))
    assert not graphs.fits(128, Batch.extend([8192], [100]))
    assert graphs.fits(512, Batch.extend([9] * SEQUENCES, [20] * SEQUENCES))
    assert not graphs.fits(512, Batch.extend([9] * (SEQUENCES + 1), [20] * (SEQUENCES + 1)))
    short = PrefixGraphs(_Runner(context_len=4096))
    assert short.wanted() == []


def test_a_batch_is_written_where_its_graph_reads_it(runner: _Runner) -> None:
    graphs = _captured(runner)
    _, _, metadata = runner.ran[0]
    slots = runner.ran[0][0].mha_one_shot_kv_indices
    slots.fill_(7)

    graphs.prepare(512, _served([300, 0, 8000], [100, 2, 300]))

    assert graphs.key(512) == (512, "nsa_tune_prefix_32768")
    assert metadata.cu_seqlens_q.tolist()[:6] == [0, 100, 102, 402, 512, 512]
    assert metadata.cu_seqlens_k.tolist()[:6] == [0, 400, 402, 8702, 8812, 8812]
    assert len(metadata.cu_seqlens_q) == SEQUENCES + 2
    listed = [row * 40000 + i for row, kv in ((1, 400), (2, 2), (3, 8300)) for i in range(kv)]
    assert graphs._slots[:8702].tolist() == listed
    assert graphs._slots[8702:8812].tolist() == [0] * 110

    graphs.prepare(512, _served([64, 0], [512, 0]))
    assert graphs.key(512) == (512, "nsa_tune_prefix_8192")
    assert metadata.cu_seqlens_k.tolist()[:4] == [0, 576, 576, 576]
    assert slots[:576].tolist() == list(range(40000, 40576))


def test_sglang_reads_the_prefix_back_by_a_list_that_is_there(wheel: Wheel) -> None:
    listed = ast.unparse(
        next(
            node
            for node in ast.walk(ast.parse(wheel.text(_MIXIN)))
            if isinstance(node, ast.FunctionDef) and node.name == "fetch_mha_one_shot_kv_indices"
        )
    )
    expanded = wheel.text(_COMMON)

    assert "if self.mha_one_shot_kv_indices is not None:" in listed
    assert "forward_batch.mha_one_shot" in expanded
    assert "sum(forward_batch.extend_prefix_lens_cpu) != 0" in expanded
    assert "forward_batch.fetch_mha_one_shot_kv_indices()" in expanded
    # What is new is written before.
    assert expanded.index("self._set_mla_kv_buffer(latent_cache") < expanded.index(
        "forward_batch.fetch_mha_one_shot_kv_indices()"
    )
