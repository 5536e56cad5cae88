"""Pictures: charts as SVG files, drawn by vl-convert without a browser."""

from __future__ import annotations

import re

from nsa_tune._errors import ExtraMissing
from nsa_tune.reports.charts.theme import THEMES, Spec, picture_theme


def as_svg(spec: Spec) -> str:
    """`spec`, with its data, as SVG text without a background, in the colours of a reader's theme.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise ExtraMissing.of("drawing charts", "report") from None
    light, dark = (
        vl_convert.vegalite_to_svg(
            {**spec, "params": [*spec["params"], {"name": "dark", "value": theme == "dark"}]},
            config=picture_theme(theme),
        )
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
