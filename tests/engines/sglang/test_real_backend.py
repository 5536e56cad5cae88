"""SGLang 0.5.15's whole attention backend on a CPU, with the plug-in on and off.

Its loader, registry, constructor, metadata and dequantization are the wheel's; torch computes
what FlashMLA, FlashAttention and DeepGEMM would.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._sglang_engine import unpack
from benchmarks.sglang_backend import compare
from tests.engines.sglang.wheels import Wheel


@pytest.mark.slow
def test_outputs_agree_while_decisions_differ(
    oldest: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack([oldest.path], tmp_path / "site")

    assert compare(tmp_path / "site", rehearse=True) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    # This release's flashmla_sparse goes through all of index_topk, and was not measured so:
    # below it only flashmla_kv takes the place of MHA.
    without = [line for line in lines if "'mha': True" in line and "steered {'mha': False" in line]
    assert without
    assert all("steered {'mha': False, 'impl': 'flashmla_kv'}" in line for line in without)
    assert any("SGLang {'rows': [16, 1]}, steered {'rows': [8, 2]}" in line for line in lines)
    assert lines[-1].startswith("OK: 6 passes, ")
