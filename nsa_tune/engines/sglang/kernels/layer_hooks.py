"""The hooks around what every layer of a pass calls, taken off while they would do nothing.

A call through a hook takes the host 5 to 8 us among all else that a layer does: four of them in
each of 61 layers are 1.5 ms of a pass that waits for its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from nsa_tune.engines.plugin import HOOKS_IN_PLACE
from nsa_tune.engines.sglang import attempt
from nsa_tune.engines.sglang.kernels.copies import PADDING, READ_BACK
from nsa_tune.engines.sglang.kernels.swap import KernelSwap
from nsa_tune.engines.sglang.kernels.topk import PAGED, RAGGED
from nsa_tune.engines.sglang.switch import paused, when_switched

_SERVING: Mapping[str, Sequence[KernelSwap]] = {
    "extend": (), "k_only": (), "fa3": (),
    "topk": (PAGED, RAGGED), "sparse": (PADDING,), "read_back": (READ_BACK,),
}  # fmt: skip
"""The kernels that a hook swaps in passes that are served; the first three swap in captures."""
_serves = False


def put_on() -> None:
    """Put all on: graphs are captured, or kernels compared, from now on."""
    global _serves
    _serves = False
    for name in _SERVING:
        if name in HOOKS_IN_PLACE:
            attempt("putting a hook on", HOOKS_IN_PLACE[name].put_on)


@contextmanager
def capturing() -> Iterator[None]:
    """Within it all are on, also where an engine that serves captures more graphs."""
    served = _serves
    put_on()
    try:
        yield
    finally:
        if served:
            serve()


def serve() -> None:
    """Leave on those by which a served pass gets a kernel of nsa-tune's, but while it is paused."""
    global _serves
    _serves = True
    for name, swaps in _SERVING.items():
        hook = HOOKS_IN_PLACE.get(name)
        if hook is None:
            continue
        if not paused() and any(swap.wins is not None and swap.wins.faster for swap in swaps):
            attempt("putting a hook on", hook.put_on)
        else:
            attempt("taking a hook off", hook.take_off)


def _switched() -> None:
    if _serves:
        serve()


when_switched(_switched)
