"""Drafts: objects of a frozen class while they are filled in."""

from __future__ import annotations

from typing import Any


def draft_of(frozen: type) -> Any:
    """The class of the drafts of `frozen`, a frozen dataclass with slots.

    A frozen class sets each field through a call, which together take longer than a whole plan. A
    draft is filled in like any object. Then its `__class__` is set to `frozen`.
    """
    thawed = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(f"{frozen.__name__}Draft", (frozen,), {"__slots__": (), **thawed})
