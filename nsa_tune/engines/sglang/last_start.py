"""What came of timing kernels when an engine last started: a line each, kept for the doctor."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nsa_tune.db.places import user_folder
from nsa_tune.engines.sglang import say_once
from nsa_tune.engines.sglang.releases import installed_version

_MOST_BYTES = 1000


def keep(what: str, text: str) -> bool:
    """Keep `text` about `what` in place of the last one; False where the folder cannot be written.

    `what` is a word that may stand in a file's name.
    """
    return written(_path(what), f"at the last start of SGLang {installed_version()}: {text}")


def written(path: Path | None, text: str) -> bool:
    """Make `text` all that is in the file, at once; False where there is none, or none may be."""
    if path is None:
        return False
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        text = f"what this start measures is not kept in {path.parent}: {error.strerror}"
        say_once(logging.WARNING, text)
        return False
    return True


def kept(what: str) -> str | None:
    """The line that was kept about `what`; None where there is none, or something else."""
    path = _path(what)
    try:
        if path is None or not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        line = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return line if line.isprintable() else None


def _path(what: str) -> Path | None:
    place = user_folder()
    return None if place is None else place / f"{what}-last-start.txt"
