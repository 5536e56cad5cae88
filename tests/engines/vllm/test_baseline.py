"""vLLM's baseline against the function bodies that it is written down from."""

from __future__ import annotations

import ast
from random import Random
from typing import Any

import pytest
import torch

from nsa_tune import Batch
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from tests.engines.vllm.engine import (
    UTILS,
    Engine,
    builder_of,
    config,
    fp8_kind,
    step_of,
)
from tests.engines.wheels import Wheel
from tests.reports.synthetic import H100

BATCHES = 1000


def _batches(seed: int) -> list[tuple[int, int, int]]:
    """(prefix, new tokens, sequences): a baseline goes by the mean, so all are alike."""
    random = Random(seed)
    return [
        (random.choice((0, random.randrange(2100), random.randrange(60000))),
         random.choice((random.randint(2, 300), random.randint(2, 4000))), random.randint(1, 9))
        for _ in range(BATCHES)
    ]  # fmt: skip


def _own(setting: Setting, name: str, batch: Batch) -> str:
    question = next(one for one in POINTS["prefill"].questions if one.name == name)
    return VLLM_0_33_0.choose(question, batch, setting)


def _taken(metadata: Any) -> tuple[str, str]:
    """The path and the kernel that the layers take for the extends."""
    mha = metadata.prefill is not None and metadata.prefill.use_dense_mha
    separate = fp8_kind(metadata) == "separate" and metadata.num_prefills
    return "mha" if mha else "mla", "flashmla_sparse" if separate else "flashmla_kv"


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_path_and_kernel_are_the_builders(wheel: Wheel, heads: int) -> None:
    builder = builder_of(Engine(wheel).flashmla(hooked=False), config(heads=heads))
    setting = Setting(profile_of("deepseek-v3.2"), heads, KVLayout.FP8_PACKED, H100)
    for prefix, new, count in _batches(heads):
        batch = Batch.extend([prefix] * count, [new] * count)
        path, kernel = _taken(builder.build(0, step_of([(prefix, new)] * count)))

        assert _own(setting, "prefill_path", batch) == path, batch
        assert _own(setting, "sparse_prefill", batch) == kernel, batch


# --- dense MLA


_BACKENDS = "vllm/v1/attention/backends/mla"


def _threshold(wheel: Wheel, file: str, name: str) -> int:
    """New tokens up to which the metadata builder `name` counts an extend as a decode."""
    fields = [
        node.value
        for node in wheel.definition(f"{_BACKENDS}/{file}.py", name).body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "reorder_batch_threshold"
        and node.value is not None
    ]
    (value,) = map(ast.literal_eval, fields)
    assert isinstance(value, int)
    return value


def test_dense_mla_goes_by_the_new_tokens(wheel: Wheel) -> None:
    threshold = _threshold(wheel, "flashattn_mla", "FlashAttnMLAMetadataBuilder")
    split = wheel.compiled(UTILS, "split_decodes_and_prefills", {"torch": torch})
    setting = Setting(profile_of("kimi-k2"), 8, KVLayout.BF16, H100)
    (path, _, _) = POINTS["dense_prefill"].questions
    for prefix, new, count in _batches(7):
        batch = Batch.extend([prefix] * count, [new] * count)
        _, prefills, _, _ = split(step_of([(prefix, new)] * count), threshold, False, True)

        taken = "mha" if prefills else "mla"
        assert VLLM_0_33_0.choose(path, batch, setting) == taken, batch


def test_flashmla_and_other_backends_go_by_fewer(wheel: Wheel) -> None:
    assert _threshold(wheel, "flashmla", "FlashMLAMetadataBuilder") == 128
    assert "reorder_batch_threshold: int = 1\n" in wheel.text(
        "vllm/model_executor/layers/attention/mla_attention.py"
    )
