"""What selecting keys takes for granted of SGLang, read again in the wheels."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nsa_tune.engines.symbols import Symbol
from tests.engines.sglang.kernels.topk_engine import BACKEND, INDEXER, METADATA
from tests.engines.sglang.wheels import BACKEND as ATTENTION
from tests.engines.sglang.wheels import Wheel

_RAGGED = "Indexer._get_topk_ragged"
_ATTENTION_CLASS = "DeepseekSparseAttnBackend"


def _symbol(wheel: Wheel) -> Symbol | None:
    return next((one for one in wheel.release.symbols if one.name == "topk"), None)


def _calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and getattr(one.func, "attr", None) == name:
            yield one


def _body(wheel: Wheel, file: str, path: str) -> str:
    return ast.unparse(wheel.definition(file, path))


def test_sglang_selects_in_one_place_and_by_keywords(wheel: Wheel) -> None:
    callers = {
        name
        for name in wheel.names("sglang/srt/layers/attention/")
        if name.endswith(".py") and "topk_backend.topk_transform(" in wheel.text(name)
    }
    (call,) = _calls(
        wheel.definition(METADATA, "DSAIndexerMetadata.topk_transform"), "topk_transform"
    )
    symbol = _symbol(wheel)

    assert callers == {METADATA}
    assert symbol is not None
    assert not call.args
    assert {word.arg for word in call.keywords} == set(symbol.arguments[1:])


def test_only_prefills_say_where_a_rows_keys_begin(wheel: Wheel) -> None:
    indexer = wheel.definition(INDEXER, "Indexer")
    methods = {
        node.name
        for node in indexer.body
        if isinstance(node, ast.FunctionDef)
        for call in _calls(node, "topk_transform")
        if any(word.arg == "ks" for word in call.keywords)
    }

    assert methods - {"_get_topk_ragged_with_cp"} == {"_get_topk_ragged"}
    assert "assert forward_batch.forward_mode.is_extend_without_speculative()" in _body(
        wheel, INDEXER, _RAGGED
    )


def test_a_chunk_of_rows_names_its_sequences_or_offsets(wheel: Wheel) -> None:
    body = _body(wheel, INDEXER, _RAGGED)

    assert "token_to_batch_idx[start:end]" in body
    assert "global_topk_offset[start:end]" in body
    assert "seq_lens_expanded[start:end]" in body


def test_a_page_has_64_slots_and_its_table_is_made_from_the_slots(wheel: Wheel) -> None:
    real = _body(wheel, ATTENTION, f"{_ATTENTION_CLASS}._transform_table_1_to_real")

    size = "self.physical_page_size" if wheel.number >= (0, 5, 23) else "self.real_page_size"

    assert "only support page size 64" in _body(wheel, INDEXER, _RAGGED)
    assert f"page_size = {size}" in real
    assert "return page_table[:, strided_indices] // page_size" in real
    assert f"page_size={size}" in wheel.text(ATTENTION)
    assert "real_page_table=self._transform_table_1_to_real(page_table)" in wheel.text(ATTENTION)


def test_the_metadata_has_what_is_read(wheel: Wheel) -> None:
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for node in wheel.definition(ATTENTION, "DSAMetadata").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }

    assert fields["max_seq_len_k"] == fields["page_size"] == "int"
    assert "real_page_table" in fields


def test_a_backend_has_what_speaks_against_it(wheel: Wheel) -> None:
    constructor = wheel.definition(ATTENTION, f"{_ATTENTION_CLASS}.__init__")
    written = {
        node.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }

    assert written >= {
        "dsa_topk_backend", "dsa_index_topk", "use_fused_topk", "num_splits",
        "hisparse_coordinator", "dsa_kv_cache_store_fp8",
    }  # fmt: skip
    if wheel.number >= (0, 5, 23):
        assert written >= {"dsa_index_kpool", "dcp_size", "_kv_shard_pool"}


def test_the_backend_is_one_object_that_all_layers_share(wheel: Wheel) -> None:
    kind = wheel.definition(BACKEND, "DSATopKBackend")

    assert isinstance(kind, ast.ClassDef)
    assert [ast.unparse(base) for base in kind.bases] == ["Enum"]
    assert "return self == DSATopKBackend.SGL_KERNEL" in ast.unparse(kind)
    assert wheel.has(BACKEND, "TopkTransformMethod")
