"""vLLM's sources. Its wheels are hundreds of megabytes of kernels, of which the tests need none.

pip says where a wheel lies. Of that file only its directory and the Python sources are read, by
range requests, and kept as a small zip: 12 MB for each version.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from functools import cache
from pathlib import Path
from urllib.error import URLError
from urllib.response import addinfourl

from tests.engines.wheels import CACHE, Unreachable, Wheel, complaint

VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
"""A release of each minor version that the plug-in is for."""

_CACHE = CACHE / "vllm"
_BLOCK = 2**22
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


@cache
def wheel_of(version: str) -> Wheel:
    """The sources of one release.

    Raises:
        Unreachable: when they are neither in the cache nor on the index.
    """
    path = _CACHE / f"vllm-{version}-sources.zip"
    if not path.exists():
        _fetch(version, path)
    return Wheel(version, path)


def _fetch(version: str, target: Path) -> None:
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        sources = Path(folder) / target.name
        try:
            _copy_sources(_url(version, folder), sources)
        except (URLError, zipfile.BadZipFile, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        # Another process may have been as quick: both bring the same file.
        sources.replace(target)


def _url(version: str, folder: str) -> str:
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps",
        "--ignore-installed", "--only-binary=:all:", "--python-version=3.12",
        "--implementation=cp", "--abi=abi3", *(f"--platform={one}" for one in _PLATFORMS),
        f"--target={folder}", "--report=-", f"vllm=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        url: str = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    except (ValueError, LookupError):
        raise Unreachable(complaint(done.stderr)) from None
    return url


def _copy_sources(url: str, target: Path) -> None:
    blocks = io.BufferedReader(RemoteFile(url), _BLOCK)
    with (
        zipfile.ZipFile(blocks) as wheel,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as kept,
    ):
        # In the order of the file: the sources lie together, and a block holds many of them.
        for member in sorted(wheel.infolist(), key=lambda one: one.header_offset):
            if member.filename.endswith(".py"):
                kept.writestr(member.filename, wheel.read(member))


class RemoteFile(io.RawIOBase):
    """A file on a web server, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        with self._range("bytes=-1") as answer:
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _range(self, wanted: str) -> addinfourl:
        request = urllib.request.Request(self._url, headers={"Range": wanted})
        answer: addinfourl = urllib.request.urlopen(request, timeout=60)
        if answer.status != 206:
            answer.close()
            raise URLError(f"{self._url} does not answer range requests")
        return answer

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset`."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill as much of `buffer` as there is."""
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        with self._range(f"bytes={self._at}-{self._at + count - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
