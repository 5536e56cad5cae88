"""The pack: what is left out of a library, which models stay, and what the host makes of it."""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import host, stand_ins
from benchmarks.engine.pack import Pack, write_parts
from benchmarks.engine.recipes import SGLANG, kept_models
from benchmarks.engine.slim import SUFFIX, restore, shrink
from tests.benchmarks.engine.modules import only_here

_CODE = {
    80: b"for an older GPU" * 8,
    90: b"dense _INTERNAL_0a1b2c3d_8_dense.cu kernel" * 4,
    91: b"another _INTERNAL_0a1b2c3d_8_other.cu kernel" * 4,
    92: b"shared by all" * 8,
}
"""Device code by what stands for it below: 91 and 92 are more code for architecture 90."""
_SYMBOLS = b"only a debugger reads this" * 4


def _library(path: Path) -> bytes:
    """A file as a linker makes it, as far as it is read: a fat binary of one container."""
    entries = b""
    for number, code in _CODE.items():
        header = struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12)
        header += struct.pack("<I", min(number, 90))
        entries += header.ljust(64, b"\0") + code
    fat = bytes(8) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.shstrtab\0.symtab\0"
    body = b"host code".ljust(64, b".") + fat + _SYMBOLS + names
    fat_at, symbols_at = 64 + 64, 64 + 64 + len(fat)
    names_at, headers_at = symbols_at + len(_SYMBOLS), 64 + len(body)
    sections = [
        (0, 0, 0, 0, 0, 0), (1, 1, 2, 0, fat_at, len(fat)),
        (12, 3, 0, 0, names_at, len(names)), (22, 2, 0, 0, symbols_at, len(_SYMBOLS)),
    ]  # fmt: skip
    table = b"".join(struct.pack("<IIQQQQ", *section) + bytes(24) for section in sections)
    elf = bytearray(b"\x7fELF\x02".ljust(64, b"\0"))
    struct.pack_into("<Q", elf, 0x28, headers_at)
    struct.pack_into("<HHH", elf, 0x3A, 64, len(sections), 2)
    data = bytes(elf) + body + table
    path.write_bytes(data)
    return data


@pytest.mark.parametrize(
    ("keep", "left_out"),
    [(None, [80]), ("dense", [80, 91]), ("nothing", [80, 90, 91])],
)
def test_only_the_wanted_device_code_stays(
    tmp_path: Path, keep: str | None, left_out: list[int]
) -> None:
    data = _library(tmp_path / "library.so")
    dropped = shrink(tmp_path / "library.so", tmp_path / "rest", 90, keep)
    with (tmp_path / "rest").open("rb") as rest:
        restore(rest, tmp_path / "restored.so")

    expected = data
    gone = [_SYMBOLS, *(_CODE[number] for number in left_out)]
    for part in gone:
        expected = expected.replace(part, bytes(len(part)))
    assert (tmp_path / "restored.so").read_bytes() == expected
    assert dropped == sum(map(len, gone))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"#!/bin/sh")
    with pytest.raises(ValueError, match="ELF"):
        shrink(path, tmp_path / "rest", 90)


def test_a_wheel_may_name_any_glibc_that_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedPipError(Exception):
        """The first download ends the test."""

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        raise AskedPipError

    commands: list[list[str]] = []
    monkeypatch.setattr("benchmarks.engine.pack.subprocess.run", run)
    with pytest.raises(AskedPipError):
        Pack(tmp_path, SGLANG["0.5.23"]).build(parts=None)

    # pip takes each tag by itself: NCCL 2.30.7 has manylinux_2_18 and no other.
    assert {f"--platform=manylinux_2_{n}_x86_64" for n in range(17, 36)} <= set(commands[0])


def test_models_stay_with_all_that_they_import() -> None:
    inside = {
        "deepseek_v2": "from sglang.srt.models.deepseek_common import x",
        "deepseek_common": "from sglang.srt.models.helper import y",
        "helper": "",
        "llama": "import sglang.srt.models.alone",
        "alone": "",
        "named": "",
    }
    kept = kept_models(inside, ["from sglang.srt.models.named import z", "models.absent"])
    assert kept == {"deepseek_v2", "deepseek_common", "helper", "named"}


@given(data=st.binary(min_size=1, max_size=99), count=st.integers(1, 5))
def test_parts_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, count: int
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    write_parts(data, folder, count)
    paths = sorted(folder.glob("parts/*/pack.*"), key=lambda path: int(path.parent.name))
    assert b"".join(path.read_bytes() for path in paths) == data
    assert len(paths) == json.loads((folder / "pack.json").read_text())["parts"] == count


def _packed(tmp_path: Path) -> Path:
    """A pack with a module and a library, in two parts."""
    stage = tmp_path / "stage"
    (stage / "site").mkdir(parents=True)
    (stage / "site" / "module.py").write_text("x = 1\n")
    (stage / "sparse" / "kernels").mkdir(parents=True)
    _library(tmp_path / "library.so")
    shrink(tmp_path / "library.so", stage / "sparse" / "kernels" / f"library.so{SUFFIX}", 90)
    archive_path = tmp_path / "pack.tar.xz"
    with tarfile.open(archive_path, "w:xz") as archive:
        for name in ("site", "sparse"):
            archive.add(stage / name, name)
    write_parts(archive_path.read_bytes(), tmp_path / "pack", 2)
    return tmp_path / "pack"


def test_the_host_unpacks_once_all_parts_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack, home = _packed(tmp_path), tmp_path / "home"
    cuda = tmp_path / "nvidia" / "cublas" / "lib"
    cuda.mkdir(parents=True)
    (cuda / "libcublas.so.12").touch()
    nvidia = SimpleNamespace(__path__=[str(tmp_path / "nvidia")])
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    command = ["unpack", str(pack), "--home", str(home)]
    second = pack / "parts" / "2"
    second.rename(tmp_path / "later")

    host.main(command)
    assert capsys.readouterr().out == "still missing: pack.2\n"
    (tmp_path / "later").rename(second)
    host.main(command)
    assert "ready" in capsys.readouterr().out
    assert (home / "site" / "module.py").read_text() == "x = 1\n"
    assert (home / "site" / "kernels" / "library.so").stat().st_mode & 0o111
    script = (home / "env.sh").read_text()
    assert f"export PYTHONPATH={home}/site\n" in script and str(cuda) in script


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("torch/lib/libtorch_cuda.so", "slim"), ("nvidia/nccl/lib/libnccl.so.2", "slim"),
        ("torch/nn/functional.py", "whole"), ("torch/bin/torch_shm_manager", "whole"),
        ("flashinfer/data/csrc/fused_moe/noAuxTcKernels.cu", "whole"),
        ("flashinfer/data/csrc/fused_moe/other.cu", "dropped"),
        ("torch/include/ATen/ATen.h", "dropped"), ("torch/_C/__init__.pyi", "dropped"),
        ("triton/backends/nvidia/bin/ptxas", "dropped"), ("sglang/test/runners.py", "dropped"),
    ],
)  # fmt: skip
def test_the_newest_release_brings_its_pytorch(name: str, becomes: str) -> None:
    recipe = SGLANG["0.5.23"]
    slim = "slim" if re.fullmatch(recipe.libraries, name) else "whole"

    assert "torch==2.14.1" in recipe.wheels.split()
    assert becomes == ("dropped" if re.match(recipe.dropped, name) else slim)


def test_a_packed_pytorch_takes_cuda_and_ptxas_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    triton = tmp_path / "host" / "triton"
    (triton / "backends/nvidia/bin").mkdir(parents=True)
    (triton / "__init__.py").touch()
    (triton / "backends/nvidia/bin/ptxas-blackwell").write_text("ptxas")
    nvidia = SimpleNamespace(__path__=[str(tmp_path / "nvidia")])
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "host"))
    site = tmp_path / "home" / "site"
    (site / "torch").mkdir(parents=True)

    host.link_cuda(site)
    host.link_cuda(site)

    assert (site / "triton/backends/nvidia/bin/ptxas").read_text() == "ptxas"
    assert (site / "nvidia/cu13").resolve() == tmp_path / "nvidia/cu13"
    script = host.environment(tmp_path / "home", "/cuda/lib")
    assert f"LD_LIBRARY_PATH={site}/torch/lib:{site}/nvidia/nccl/lib:/cuda/lib" in script


def test_parts_of_two_packs_are_refused(tmp_path: Path) -> None:
    pack = _packed(tmp_path)
    (pack / "parts" / "1" / "pack.1").write_bytes(b"other")
    with pytest.raises(ValueError, match="do not belong together"):
        host.unpack(pack, tmp_path / "home")


def test_caches_travel_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for name in ("kernel.cubin", "kernel.o"):
        (home / "triton").mkdir(parents=True, exist_ok=True)
        (home / "triton" / name).write_text(name)
    host.main(["save-caches", str(tmp_path / "caches"), "--home", str(home)])
    assert "cache-triton.tar.xz" in capsys.readouterr().out
    assert list(host.add_caches(tmp_path / "caches", other)) == ["cache-triton.tar.xz"]
    assert [path.name for path in (other / "triton").iterdir()] == ["kernel.cubin"]


def test_stand_ins_can_be_imported_inherited_from_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(Path(stand_ins.__path__[0])))
    with only_here("xgrammar", "soundfile", "IPython"):
        grammar = importlib.import_module("xgrammar")
        inner = importlib.import_module("xgrammar.some.module")
        importlib.import_module("soundfile")
        display = importlib.import_module("IPython.display")

        assert issubclass(type("Own", (grammar.Compiler,), {}), grammar.Compiler)
        assert inner.Compiler is grammar.Compiler
        inner.Anything(1, key=2)
        display.display(display.HTML("x"))
        with pytest.raises(AttributeError):
            _ = grammar.__wrapped__
