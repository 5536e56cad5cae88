"""What follows from the tuned choices, and that a plan only changes by making another."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.dispatch.plan import Derived, Plan, Reason, coupled, facts_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout

_FP8, _BF16 = KVLayout.FP8_PACKED, KVLayout.BF16


def derive(
    batch: Batch, layout: KVLayout, topk: int, path: str | None, sparse: str | None,
    decode: str | None = None,
) -> Derived:  # fmt: skip
    """What follows on one batch."""
    return coupled(batch.mode, layout, path, sparse, *facts_of(batch, topk), decode)


_WARM, _COLD = Batch.extend([100], [10]), Batch.extend([0], [10])


@pytest.mark.parametrize(
    ("layout", "sparse", "transform"),
    [
        (_FP8, "flashmla_sparse", "ragged"),
        (_FP8, "torch_sparse", "ragged"),
        (_FP8, "flashmla_kv", "paged"),
        (_FP8, "torch_kv", "paged"),
        (_FP8, "trtllm", "paged"),
        (_BF16, "flashmla_sparse", "paged"),
        (_FP8, None, None),
    ],
)
@pytest.mark.parametrize("path", ["mha", "mla"])
def test_in_extend_the_topk_transform_follows_the_sparse_prefill_kernel(
    layout: KVLayout, sparse: str | None, transform: str | None, path: str
) -> None:
    assert derive(_WARM, layout, 2048, path, sparse).topk_transform == transform


@pytest.mark.parametrize(
    "batch", [Batch.decode([99]), Batch.verify([99], 2), Batch.draft_extend([99], 2)], ids=str
)
def test_decoding_is_paged_and_carries_no_prefill_choice(batch: Batch) -> None:
    for sparse in ("flashmla_sparse", "flashmla_kv", None):
        assert derive(batch, _FP8, 2048, None, sparse) == Derived("paged", None, False)


@pytest.mark.parametrize(
    ("batch", "layout", "path", "sparse", "dequantize"),
    [
        (_WARM, _FP8, "mha", "flashmla_kv", True),
        (_WARM, _FP8, "mla", "flashmla_sparse", True),
        (_WARM, _FP8, "mla", "torch_sparse", True),
        (_WARM, _FP8, "mla", "flashmla_kv", False),
        (_WARM, _BF16, "mha", "flashmla_sparse", False),
        (_COLD, _FP8, "mha", "flashmla_sparse", False),
        (_WARM, _FP8, None, None, None),
    ],
)
def test_an_fp8_prefix_is_dequantized_for_kernels_that_read_bf16(
    batch: Batch, layout: KVLayout, path: str | None, sparse: str | None, dequantize: bool | None
) -> None:
    assert derive(batch, layout, 2048, path, sparse).dequantize_prefix is dequantize


@pytest.mark.parametrize(
    ("batch", "layout", "path", "sparse", "decode", "conversion"),
    [
        (_WARM, _FP8, "mha", "flashmla_kv", None, "packed_fp8.dequantize"),
        (_WARM, _FP8, "mla", "flashmla_sparse", None, "packed_fp8.dequantize"),
        (_WARM, _FP8, "mla", "flashmla_kv", None, None),
        (_COLD, _FP8, "mla", "flashmla_sparse", None, None),
        (_WARM, _BF16, "mha", "flashmla_sparse", None, None),
        (_WARM, _FP8, None, None, None, None),
        (_WARM, _FP8, "mla", "nobody's", None, None),
        (Batch.decode([9]), _FP8, None, None, "flashmla_sparse", "packed_fp8.dequantize"),
        (Batch.decode([9]), _FP8, None, None, "flashmla_kv", None),
        (Batch.decode([9]), _FP8, None, None, None, None),
    ],
)
def test_the_layout_is_converted_for_kernels_that_do_not_read_the_pool(
    batch: Batch, layout: KVLayout, path: str | None, sparse: str | None, decode: str | None,
    conversion: str | None,
) -> None:  # fmt: skip
    assert derive(batch, layout, 2048, path, sparse, decode).layout_conversion == conversion


@pytest.mark.parametrize(("new", "skip"), [(2047, True), (2048, True), (2049, False)])
def test_topk_is_skipped_while_every_token_is_selected(new: int, skip: bool) -> None:
    batch = Batch.extend([0, 0], [1, new])

    assert derive(batch, _FP8, 2048, "mha", "flashmla_kv").skip_topk is skip


class _Counting:
    """Says why, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def names(self, plan: Plan) -> tuple[str, ...]:
        return ("prefill_path", "skip_topk")

    def reason(self, plan: Plan, name: str) -> Reason:
        self.asked.append(name)
        return Reason(Verdict.FORCED, "made up", {}, {}, {}, f"{name} of {plan.batch}")


def _plan(origin: _Counting) -> Plan:
    kernels = ("mla", None, "flashmla_kv", None, None, None, None, None)
    return Plan(_WARM, *kernels, "paged", False, True, origin)


def test_reasons_are_made_when_they_are_looked_at() -> None:
    origin = _Counting()
    reasons = _plan(origin).reasons

    assert list(reasons) == ["prefill_path", "skip_topk"]
    assert len(reasons) == 2
    assert "sparse_prefill" not in reasons
    assert origin.asked == []
    assert reasons["skip_topk"].text == "skip_topk of extend:100+10"
    assert origin.asked == ["skip_topk"]


def test_a_field_without_a_reason_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        _plan(_Counting()).reasons["indexer_layout"]


def test_plans_are_immutable_and_compare_by_their_decisions() -> None:
    plan = _plan(_Counting())

    with pytest.raises(FrozenInstanceError):
        plan.prefill_path = "mha"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        plan.extra = 1  # type: ignore[attr-defined]
    assert plan == _plan(_Counting())
    assert "_origin" not in repr(plan)


def test_v4_answers_for_each_ratio_and_derives_nothing() -> None:
    dispatcher = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v4", heads=128, kv_dtype="fp8"
    )
    batch = Batch.extend([8192], [16])
    plan = dispatcher.plan(batch)

    assert (plan.v4_prefill_c4, plan.v4_prefill_c128) == ("with_kvcache", "with_kvcache")
    assert set(plan.reasons) == {"v4_prefill_c4", "v4_prefill_c128"}
    assert plan.prefill_path is None
    assert plan.topk_transform is None
    assert plan.dequantize_prefix is None
    assert "v4_prefill_c128 = with_kvcache" in dispatcher.explain(batch)


def test_other_models_have_no_v4_answers() -> None:
    dispatcher = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=128, kv_dtype="fp8"
    )
    plan = dispatcher.plan(_WARM)

    assert plan.v4_prefill_c4 is None
    assert plan.v4_prefill_c128 is None
    assert not [name for name in plan.reasons if name.startswith("v4")]
