"""Pictures: charts as SVG files, drawn by vl-convert without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nsa_tune._errors import ExtraMissing, NsaTuneError
from nsa_tune.reports.charts.figures import Figure
from nsa_tune.reports.charts.theme import THEMES, Spec, picture_theme

_WIDTH = 460
"""Pixels, for charts that fill their container on a page."""


def write_pictures(figures: Iterable[Figure], directory: Path) -> Iterator[Path]:
    """Write `figures` into `directory`, and yield their paths.

    Raises:
        ExtraMissing: when vl-convert is not installed.
        NsaTuneError: when a file cannot be written.
    """
    for figure in figures:
        text = as_svg(figure.spec)
        path = directory / f"{figure.name}.svg"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        except OSError as error:
            raise NsaTuneError(
                f"{path} cannot be written ({error.strerror}); give another directory with --out"
            ) from error
        yield path


def as_svg(spec: Spec) -> str:
    """`spec`, with its data, as SVG text without a background, in the colours of a reader's theme.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    light, dark = (
        _converter().vegalite_to_svg(_standing(spec, theme), config=picture_theme(theme))
        for theme in THEMES
    )
    return _with_dark_colours(light, dark)


_COLOUR = re.compile(r'(fill|stroke)="(#[0-9a-f]{6})"')


def _with_dark_colours(light: str, dark: str) -> str:
    """The picture `light` with a style that gives it the colours of `dark`, the same picture."""
    rules = {
        f'[{name}="{colour}"]{{{name}:{other}}}': None
        for (name, colour), (_, other) in zip(
            _COLOUR.findall(light), _COLOUR.findall(dark), strict=True
        )
        if colour != other
    }
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    head, _, rest = light.partition(">")
    return f"{head}>{style}{rest}"


def _converter() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise ExtraMissing.of("drawing charts", "report") from None
    return vl_convert


def _standing(spec: Spec, theme: str) -> Spec:
    """`spec` for a file: with a fixed width, and a flag for the page's colour."""
    params = [*spec.get("params", ()), {"name": "dark", "value": theme == "dark"}]
    width = {"width": _WIDTH} if spec.get("width") == "container" else {}
    return {**spec, **width, "params": params}
