"""What a job shall make a table of: the fields of a key that somebody asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from nsa_tune._errors import UnknownName, UsageError
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key
from nsa_tune.fleet.service.documents import libraries_in, number_in, text_in

KV_DTYPES = ("fp8", "bf16")


def kv_dtype_of(model: str, kv_layout: str) -> str:
    """The `--kv-dtype` that measures `kv_layout` of `model`.

    Raises:
        UnknownName: when there is no such model, or none of its pools has that layout.
    """
    profile = profile_of(model)
    layouts: dict[str, str] = {}
    for dtype in KV_DTYPES:
        try:
            layouts.setdefault(str(profile.layout(dtype)), dtype)
        except UnknownName:
            continue
    if kv_layout not in layouts:
        raise UnknownName.of(f"KV layout of {model}", kv_layout, list(layouts))
    return layouts[kv_layout]


@dataclass(frozen=True, slots=True)
class Target:
    """A table that is wanted. The first four fields name it."""

    gpu: str
    model: str
    heads: int
    """Local heads."""
    kv_layout: str
    driver: str | None = None
    """None stands for any, as for libraries."""
    libraries: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The target that a JSON object describes; `kv_dtype` may stand for `kv_layout`.

        Raises:
            UsageError: when it describes none that can be measured.
        """
        model, gpu = text_in(document, "model"), text_in(document, "gpu")
        profile = profile_of(model)
        if "kv_layout" in document or "kv_dtype" not in document:
            layout = text_in(document, "kv_layout")
        else:
            layout = str(profile.layout(text_in(document, "kv_dtype")))
        kv_dtype_of(model, layout)
        heads = profile.check_heads(number_in(document, "heads", profile.heads))
        if not gpu:
            raise UsageError("'gpu' must be the name that the driver reports")
        driver = None if document.get("driver") is None else text_in(document, "driver")
        return cls(gpu, model, heads, layout, driver, libraries_in(document))

    @classmethod
    def of_key(cls, key: Key) -> Self:
        """The target that exactly `key` meets."""
        return cls(key.gpu, key.model, key.heads, key.kv_layout, key.driver,
                   tuple(sorted(key.libraries)))  # fmt: skip

    @property
    def name(self) -> tuple[str, str, int, str]:
        """The fields that name a table."""
        return self.gpu, self.model, self.heads, self.kv_layout

    def met_by(self, key: Key) -> bool:
        """Whether a table of `key` is what is wanted."""
        return (
            self.name == (key.gpu, key.model, key.heads, key.kv_layout)
            and self.driver in (None, key.driver)
            and self.libraries in (None, tuple(sorted(key.libraries)))
        )

    def lacking(self, keys: Iterable[Key]) -> str:
        """Why none of `keys` is what is wanted, as a clause; "" where one is."""
        named = [key for key in keys if self.name == (key.gpu, key.model, key.heads, key.kv_layout)]
        if any(self.met_by(key) for key in named):
            return ""
        if not named:
            return "no table"
        if self.driver not in (None, *(key.driver for key in named)):
            return f"no table of driver {self.driver}"
        return "no table of these libraries"

    @property
    def libraries_text(self) -> str | None:
        """The libraries as JSON: the same text for the same libraries."""
        return None if self.libraries is None else libraries_text(self.libraries)


def libraries_text(libraries: Iterable[tuple[str, str]]) -> str:
    """JSON: distribution to version, sorted."""
    return json.dumps(dict(sorted(libraries)))
