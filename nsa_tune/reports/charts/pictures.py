"""Pictures: charts as SVG and PNG files, drawn by vl-convert without a browser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nsa_tune._errors import ExtraMissing, NsaTuneError
from nsa_tune.reports.charts.figures import Figure
from nsa_tune.reports.charts.theme import PAGES, Spec, picture_theme

_WIDTH = 460
"""Pixels, for charts that fill their container on a page."""
_SCALE = 2.0
"""Pixels of a PNG for each pixel of the chart."""


def write_pictures(
    figures: Iterable[Figure], directory: Path, form: str, theme: str = "light"
) -> Iterator[Path]:
    """Write `figures` into `directory`, in `form` "svg" or "png", and yield their paths.

    Raises:
        ExtraMissing: when vl-convert is not installed.
        NsaTuneError: when a file cannot be written.
    """
    for figure in figures:
        data = drawn(figure.spec, form, theme)
        path = directory / f"{figure.name}.{form}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise NsaTuneError(
                f"{path} cannot be written ({error.strerror}); give another directory with --out"
            ) from error
        yield path


def drawn(spec: Spec, form: str, theme: str = "light") -> bytes:
    """`spec`, with its data, as the bytes of a file in `form` "svg" or "png".

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    return as_png(spec, theme) if form == "png" else as_svg(spec, theme).encode()


def as_svg(spec: Spec, theme: str = "light") -> str:
    """`spec`, with its data, as SVG text on the theme's background.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    svg: str = _converter().vegalite_to_svg(_standing(spec, theme), config=picture_theme(theme))
    return svg


def as_png(spec: Spec, theme: str = "light") -> bytes:
    """`spec`, with its data, as a PNG of twice its size.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    png: bytes = _converter().vegalite_to_png(
        _standing(spec, theme), config=picture_theme(theme), scale=_SCALE
    )
    return png


def _converter() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise ExtraMissing.of("drawing charts", "report") from None
    return vl_convert


def _standing(spec: Spec, theme: str) -> Spec:
    """`spec` for a file: with a fixed width, and a flag for the page's colour."""
    params = [{"name": "dark", "value": PAGES[theme] == PAGES["dark"]}]
    width = {"width": _WIDTH} if spec.get("width") == "container" else {}
    return {**spec, **width, "params": params}
