"""Dense MLA in pass mode: which engines have it, and what its dense graphs hold."""

from __future__ import annotations

import ast
import sys
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import ALL_TOKENS
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang import facts as module
from nsa_tune.engines.sglang.eligible import ROWS, Engine, why_not
from nsa_tune.engines.sglang.facts import facts_of, index_topk_of, is_dense_mla
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.choice import Choice
from nsa_tune.engines.sglang.pass_mode.whole_pass.expanded import around_path
from nsa_tune.engines.sglang.releases import DENSE_PATHS
from nsa_tune.engines.sglang.switch import Part
from tests.engines.sglang.wheels import Wheel

_FLASH = "sglang/srt/layers/attention/flashattention_backend.py"


class _Method(Enum):
    MLA = auto()
    MHA_ONE_SHOT = auto()
    MHA_CHUNKED_KV = auto()


class FlashAttentionBackend:
    """SGLang's, as far as the plug-in looks at it."""

    def __init__(self, version: int = 3, *, use_mla: bool = True) -> None:
        self.use_mla, self.fa_impl_ver, self.num_splits = use_mla, version, 0


def _runner(heads: int = 128, dtype: str = "torch.bfloat16", **shape: int) -> Any:
    widths = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_size": 7168,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(num_attention_heads=heads, **(widths | shape)),
        kv_cache_dtype=dtype, layer_info=SimpleNamespace(num_effective_layers=61),
    )  # fmt: skip


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "parallel", lambda: SimpleNamespace(attn_tp_size=8))


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(("heads", "model"), [(128, "deepseek-v3"), (64, "kimi-k2")])
def test_an_engine_of_dense_mla_is_known_by_its_shape(heads: int, model: str) -> None:
    facts = facts_of(FlashAttentionBackend(), _runner(heads))

    assert (facts.profile.name, facts.heads, facts.kv_dtype) == (model, heads // 8, "bf16")
    assert (facts.impl, facts.layers) == ("fa3", 61)
    assert index_topk_of(FlashAttentionBackend()) == ALL_TOKENS


@pytest.mark.usefixtures("eight_ranks")
def test_other_shapes_and_pools_are_left_alone() -> None:
    with pytest.raises(LeftAlone, match="no model profile"):
        facts_of(FlashAttentionBackend(), _runner(kv_lora_rank=256))
    with pytest.raises(LeftAlone, match="hidden_size 5120"):
        facts_of(FlashAttentionBackend(), _runner(hidden_size=5120))
    with pytest.raises(LeftAlone, match="float8"):
        facts_of(FlashAttentionBackend(), _runner(dtype="torch.float8_e4m3fn"))


def test_flashattention_3_for_mla_alone_is_dense_mla() -> None:
    assert is_dense_mla(FlashAttentionBackend())
    assert not is_dense_mla(FlashAttentionBackend(4))
    assert not is_dense_mla(FlashAttentionBackend(use_mla=False))
    assert not is_dense_mla(SimpleNamespace(use_mla=True, fa_impl_ver=3))


def test_no_table_and_no_other_kernel_has_a_say_there() -> None:
    engine = Engine(_runner(), FlashAttentionBackend())

    left = (Part.DENSE_MLA, Part.DECODE_GRAPHS, Part.TOPK, Part.COPIES, Part.DECODE)
    for part in (Part.TABLE, *left):
        assert why_not(part, engine) == "dense MLA"


@pytest.mark.usefixtures("eight_ranks")
def test_its_passes_are_steered_without_being_asked_for_where_the_model_is_known() -> None:
    row = next(row for row in ROWS if row.reason.startswith("dense MLA of other models"))
    assert row.parts == {Part.PASSES}

    assert not row.applies(Engine(_runner(), FlashAttentionBackend()))
    # Nothing is captured for what would be left alone afterwards.
    for changed in (_runner(hidden_size=5120), _runner(dtype="torch.float8_e4m3fn")):
        assert why_not(Part.PASSES, Engine(changed, FlashAttentionBackend())) == row.reason


def test_a_dense_graph_holds_mha_where_sglang_absorbs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashAttentionBackend()
    handlers = SimpleNamespace(get_attn_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, DENSE_PATHS, handlers)

    def path() -> Any:
        return around_path(lambda *given: _Method.MLA, object(), object(), "fa3")

    assert path() is _Method.MLA
    backend.use_mha = True  # type: ignore[attr-defined]
    assert path() is _Method.MHA_ONE_SHOT


def test_where_sglang_expands_in_chunks_it_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(use_mha=True)
    handlers = SimpleNamespace(get_attn_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, DENSE_PATHS, handlers)

    method = around_path(lambda *given: _Method.MHA_CHUNKED_KV, object(), object(), "fa3")

    assert method is _Method.MHA_CHUNKED_KV


def test_a_release_whose_backend_is_elsewhere_keeps_its_own_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every layer of an engine with FlashAttention comes here, steered or not."""
    monkeypatch.setitem(sys.modules, DENSE_PATHS, SimpleNamespace())

    assert around_path(lambda *given: _Method.MLA, object(), object(), "fa3") is _Method.MLA


def test_an_eager_pass_is_expanded_behind_any_prefix() -> None:
    choice = Choice((64, 8192), ALL_TOKENS, {}, ())

    for prefix in (0, 100, 100_000):
        assert PassMode.EAGER in choice.ways(Batch.extend([prefix], [8000]), None)


def test_attention_reads_what_a_dense_graph_writes(wheel: Wheel) -> None:
    metadata = wheel.definition(_FLASH, "FlashAttentionMetadata")
    fields = {
        node.target.id
        for node in metadata.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    attention = ast.unparse(wheel.definition(_FLASH, "FlashAttentionBackend.forward_extend"))

    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seq_len_q", "max_seq_len_k"):
        assert name in fields
        assert f"metadata.{name}" in attention
    built = ast.unparse(wheel.definition(_FLASH, "FlashAttentionBackend.__init__"))
    assert "self.use_mla = " in built
    assert "self.fa_impl_ver = " in built
