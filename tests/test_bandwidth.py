"""The bandwidth benchmark: every streaming kernel is in it, runs, and is refused without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import bandwidth
from nsa_tune.backend.types.layouts import CONVERSIONS


def test_every_conversion_is_among_the_streams_and_counts_its_bytes() -> None:
    if torch.cuda.is_available():
        pytest.skip("runs the kernels interpreted")
    device = torch.device("cpu")
    streams = {stream.name: stream for maker in bandwidth.MAKERS for stream in maker(64, device)}

    assert {one.kernel for one in CONVERSIONS} < set(streams)
    assert streams["packed_fp8.dequantize"].moved_bytes == 64 * (656 + 1152 + 4)
    assert streams["combine_indices.combine_indices"].moved_bytes == 64 * 4 * (640 + 640 + 3)
    for stream in streams.values():
        stream.run()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bandwidth.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as leaving:
        bandwidth.main()

    assert leaving.value.code == 2
    assert "means something on a GPU only" in capsys.readouterr().err
