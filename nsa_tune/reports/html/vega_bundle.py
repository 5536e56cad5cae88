"""Vega, Vega-Lite and Vega-Embed as one script, made by the installed vl-convert."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.util import find_spec

from nsa_tune._errors import ExtraMissing

_EMBED = "window.nsaTuneEmbed = vegaEmbed;"
_CODE = (
    "import sys, vl_convert\n"
    f"sys.stdout.buffer.write(vl_convert.javascript_bundle({_EMBED!r}).encode())"
)


def has_charts() -> bool:
    """Whether vl-convert is installed."""
    return find_spec("vl_convert") is not None


def charts_javascript() -> str:
    """The script that draws charts.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    if not has_charts():
        raise ExtraMissing.of("drawing charts", "report")
    return _bundled()


@cache
def _bundled() -> str:
    """The script, without global names, and without a "</script" that would end its element."""
    # In a process of its own: vl-convert holds the GIL for a second, and a service shall answer.
    # -P: do not import modules from the working directory.
    command = [sys.executable, "-P", "-c", _CODE]
    bundle = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
    script = f"(() => {{{bundle}\n}})();"
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
