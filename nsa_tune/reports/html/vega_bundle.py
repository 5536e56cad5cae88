"""Vega, Vega-Lite and Vega-Embed as one script, made by the installed vl-convert.

That takes a second, during which vl-convert holds the GIL. So it runs in a process of its own,
while the caller makes the report.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from nsa_tune._errors import ExtraMissing

_EMBED = "window.nsaTuneEmbed = vegaEmbed;"
_CODE = (
    "import sys, vl_convert\n"
    f"sys.stdout.buffer.write(vl_convert.javascript_bundle({_EMBED!r}).encode())"
)
_made: list[str] = []
"""The script, once made."""


def charts_javascript() -> str:
    """The script that draws charts; made once per process.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    with bundling() as javascript:
        return javascript()


@contextmanager
def bundling() -> Iterator[Callable[[], str]]:
    """Start to make the script, and yield the function that waits for it.

    Raises:
        ExtraMissing: from that function, when vl-convert is not installed.
    """
    if find_spec("vl_convert") is None:
        yield _missing
        return
    if _made:
        yield lambda: _made[0]
        return
    # -P: do not import modules from the working directory.
    with subprocess.Popen([sys.executable, "-P", "-c", _CODE], stdout=subprocess.PIPE) as process:
        try:
            yield lambda: _collected(process)
        finally:
            process.kill()


def _missing() -> str:
    raise ExtraMissing.of("drawing charts", "report")


def _collected(process: subprocess.Popen[bytes]) -> str:
    if not _made:
        bundle, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"vl-convert's bundler ended with {process.returncode}")
        _made.append(_enclosed(bundle.decode()))
    return _made[0]


def _enclosed(bundle: str) -> str:
    """`bundle` without global names, and without a "</script" that would end its element."""
    script = f"(() => {{{bundle}\n}})();"
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
