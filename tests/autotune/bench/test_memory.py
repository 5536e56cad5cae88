"""Memory that other processes hold, on hosts whose pages are larger than usual."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from nsa_tune.autotune.bench import memory

GIB = 2**30


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_a_host_s_memory_is_counted_in_its_own_pages(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of Grace have pages of 64 KiB: what this process holds is nobody else's."""
    pages = tmp_path / "statm"
    pages.write_text(f"99999999 {60 * GIB // page_bytes} 0 0 0 0 0")
    monkeypatch.setattr(memory, "_PAGES", str(pages))
    facts = {"MemTotal": 100 * GIB, "MemAvailable": 10 * GIB}
    monkeypatch.setattr(memory, "_memory_facts", lambda: facts)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": page_bytes}.__getitem__)

    assert memory.held_by_others(torch.device("cpu")) == (30 * GIB, 100 * GIB)
