"""How kernels are compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from nsa_tune.backend.kernels import launch
from nsa_tune.backend.kernels.launch import Kernel, compile_soon

if TYPE_CHECKING:
    import pytest


def test_what_other_threads_compile_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, ...]] = []

    def compile_one(*given: str) -> tuple[bytes, str]:
        compiled.append(given)
        return given[0].encode(), f"_Z{given[1]}"

    launch._binary.cache_clear()
    monkeypatch.setattr("torch.cuda._utils._nvrtc_compile", compile_one)
    monkeypatch.setattr(
        "torch.cuda._utils._cuda_load_module", lambda binary, names: {names[0]: binary}
    )
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    library = SimpleNamespace(cuLaunchKernel=None)
    monkeypatch.setattr(launch, "ctypes", SimpleNamespace(CDLL=lambda name: library))

    compile_soon(["one", "another"], "kernel")
    made = [Kernel(source, "kernel", "PP").compiled for source in ("one", "another", "a third")]
    launch._binary.cache_clear()

    assert made == [b"one", b"another", b"a third"]
    assert sorted(compiled[:2]) == [("another", "kernel", "90"), ("one", "kernel", "90")]
    assert compiled[2:] == [("a third", "kernel", "90")]
