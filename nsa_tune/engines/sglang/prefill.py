"""Steering `set_dsa_prefill_impl`: dense MHA or not, and by which kernel MLA runs.

The engine's own method runs first. What it decided is then changed within these bounds:

- MHA is turned off, never on. The engine turns it on wherever that is exact and possible, so
  there is nothing to add, and MHA that it has refused (in a CUDA graph, say) stays refused.
- The kernel is one that reads the same pool, was measured, and takes no more scratch memory than
  the engine has to spare.
- A union of four queries' keys is taken by how much queries were seen to share.
- Only plain extend batches are steered, and only from lists of lengths that the host has. Their
  sums are enough, with the pairs that are read where only some queries select all of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.decision_log import DecisionLog, table_of
from nsa_tune.engines.extends import batch_of, selecting, sums_of
from nsa_tune.engines.sglang import attempt
from nsa_tune.engines.sglang.costs import sharing
from nsa_tune.engines.sglang.facts import TRITON, Facts, kernel_of
from nsa_tune.engines.sglang.switch import paused
from nsa_tune.engines.shared_keys import SharedKeys

_ATTRIBUTE = "_nsa_tune_prefill"
_MHA, _EXTEND = "mha", "forward_extend"
ENGINE_KERNEL = "_nsa_tune_engine_kernel"
"""An attribute of the backend while a pass keeps SGLang's own choices."""
MADE_UP = "_nsa_tune_made_up"
"""An attribute of the backend while a start runs passes that no user has sent."""
PROVEN_KERNEL = "_nsa_tune_proven_kernel"
"""An attribute of the backend while a start compares a kernel: its arm's name."""
_UNION = f"{TRITON}_union4"
_TRITONS = frozenset({TRITON, _UNION})
_STEPS = 16
"""Shares of a selection that are told apart, rounded down: unions are taken a little late."""
_FEW, _SOME = 1024, 2048
"""New tokens up to which nothing shared counts, and a quarter of all keys less than is shared. Such
a pass may wait for its host, for which a union is several launches more in each layer: one of
GLM-5's 8192+2048 took 125 to 200 us more by a union than by its kernels' times."""
_SORTED_BYTES = 20
"""Scratch of a union for a query and key: sorted keys, their places, the union and its bits."""


def around_prefill(original: Callable[..., Any], backend: Any, forward_batch: Any = None) -> Any:
    """The hook around `set_dsa_prefill_impl`, which runs once a forward pass."""
    prefill = backend.__dict__.get(_ATTRIBUTE)
    if prefill is None:
        return original(backend, forward_batch)
    prefill.give_back()
    result = original(backend, forward_batch)
    if paused() or ENGINE_KERNEL in backend.__dict__:
        return result
    if forward_batch is not None and not attempt(
        "steering a prefill", prefill.steer, forward_batch
    ):
        prefill.abandon()
        delattr(backend, _ATTRIBUTE)
    return result


def detach(backend: Any) -> None:
    """Leave `backend` to SGLang, as it would be by now."""
    prefill = backend.__dict__.pop(_ATTRIBUTE, None)
    if prefill is not None:
        prefill.give_back()


def source_of(backend: Any) -> str | None:
    """Which table chooses `backend`'s prefill kernels; None where none does."""
    prefill = backend.__dict__.get(_ATTRIBUTE)
    return None if prefill is None else str(prefill.answers.source)


def changed(backend: Any) -> bool:
    """Whether the table changed what SGLang would have done in the last pass."""
    prefill = backend.__dict__.get(_ATTRIBUTE)
    return prefill is not None and prefill.has_changed


def chosen(backend: Any, prefix_lens: list[int], extend_lens: list[int]) -> str | None:
    """The table's kernel for a batch in a prefill graph, where SGLang never takes MHA; None where
    it leaves that to SGLang."""
    prefill: Prefill | None = backend.__dict__.get(_ATTRIBUTE)
    return None if prefill is None else prefill.answer(prefix_lens, extend_lens, engine_mha=False)


def note(backend: Any, forward_batch: Any, way: str) -> None:
    """Log a pass that runs in another way than by the table's kernel."""
    prefill: Prefill | None = backend.__dict__.get(_ATTRIBUTE)
    if prefill is not None:
        prefill.note(forward_batch, {}, {"pass_mode": way})


def start_looking(runner: Any) -> None:
    """From now on `runner` serves passes: what their queries share counts, if any kernel is chosen
    by it."""
    prefill = runner.attn_backend.__dict__.get(_ATTRIBUTE)
    if prefill is not None and _UNION in prefill.answers.impls:
        prefill.shared_keys = SharedKeys(prefill.answers.index_topk)


def kernels_to_prove(backend: Any) -> list[str]:
    """Kernels that no table need choose in the passes by which a start compares its ways."""
    prefill = backend.__dict__.get(_ATTRIBUTE)
    return [] if prefill is None else sorted(prefill.answers.impls & _TRITONS)


def leave_out(backend: Any, impls: Iterable[str]) -> None:
    """Never take these kernels."""
    prefill = backend.__dict__.get(_ATTRIBUTE)
    if prefill is not None:
        prefill.answers.impls -= frozenset(impls)


def is_plain_extend(forward_batch: Any) -> bool:
    """Whether the pass is a prefill and nothing else.

    Halves of a batch must agree with each other, and a mixed batch with decoding.
    """
    mode = forward_batch.forward_mode
    return (
        mode is type(mode).EXTEND
        and not forward_batch.tbo_children
        and forward_batch.tbo_parent_token_range is None
    )


class Answers:
    """The choices of a dispatcher as SGLang's settings."""

    def __init__(self, dispatcher: Dispatcher, facts: Facts, impls: frozenset[str]) -> None:
        # Asking for these alone takes less time than a plan, which answers more.
        self._both = dispatcher.choosers(("prefill_path", "sparse_prefill"))
        steps = range(_STEPS if _UNION in impls else 1)
        self._kernels = [
            sharing(dispatcher, step / _STEPS).chooser("sparse_prefill") for step in steps
        ]
        self.source = dispatcher.source
        """Which table answers, in words."""
        self.table = table_of(dispatcher.setting)
        """Which table answers, for the decision log."""
        self.impls = impls
        self.index_topk = topk = facts.profile.index_topk
        # What a prefix takes while flashmla_sparse reads it; a bf16 pool is read where it lies.
        packed = facts.layout is KVLayout.FP8_PACKED
        self._most_kv = facts.scratch_bytes // (2 * facts.profile.latent) if packed else None
        # flashmla_kv takes scratch by the query; an engine that runs it anyway has seen to that.
        starts_with_kv = facts.impl == "flashmla_kv"
        self._most_q = {_UNION: facts.scratch_bytes // (_SORTED_BYTES * topk)}
        if not starts_with_kv:
            self._most_q["flashmla_kv"] = facts.scratch_bytes // facts.scratch_bytes_a_query

    def asked(self, prefix_lens: list[int], extend_lens: list[int]) -> Batch | None:
        """The batch to ask for."""
        sums = sums_of(prefix_lens, extend_lens)
        return sums and selecting(sums, prefix_lens, extend_lens, self.index_topk)

    def of(
        self, batch: Batch, *, engine_mha: bool, kept: float = 0.0, proven: str | None = None
    ) -> str | None:
        """The kernel for MLA, or "mha" where the engine's own MHA stays; None leaves it to the
        engine. Queries keep a share of the selection before theirs; `proven` is the kernel where a
        start compares it."""
        # Beyond index_topk the engine takes MHA only where it was told to put up with the
        # difference: no table has a say in that.
        if engine_mha:
            if batch.max_kv > self.index_topk:
                return _MHA
            # All keys are selected, whatever queries keep.
            path, impl = self._both(batch)
            if path != "mla":
                return _MHA
        else:
            impl = proven or self._kernels[min(int(kept * _STEPS), len(self._kernels) - 1)](batch)
        q_tokens, kv_tokens = batch.q_tokens, batch.kv_tokens
        if impl is None or impl not in self.impls or q_tokens > self._most_q.get(impl, q_tokens):
            return None
        reads_back = impl != "flashmla_kv" and kv_tokens > q_tokens
        if self._most_kv is not None and reads_back and kv_tokens > self._most_kv:
            return None
        return impl


class Prefill:
    """Steers one backend."""

    def __init__(self, backend: Any, answers: Answers, log: DecisionLog | None) -> None:
        self._backend = backend
        self.answers = answers
        self._log = log
        self._engines: tuple[bool, str, Any] | None = None
        """The engine's own `use_mha`, `dsa_prefill_impl` and union, where they were changed."""
        self.shared_keys: SharedKeys | None = None
        """What queries were seen to share; None where no kernel is chosen by it."""
        self._looks = False
        """Whether the layers of this pass are looked at."""

    @classmethod
    def attach(cls, backend: Any, answers: Answers, log: DecisionLog | None) -> None:
        """Steer `backend` from now on."""
        setattr(backend, _ATTRIBUTE, cls(backend, answers, log))

    @property
    def has_changed(self) -> bool:
        """Whether the last pass ran otherwise than the engine would have run it."""
        return self._engines is not None

    def give_back(self) -> None:
        """Undo the last pass: the engine's method writes its kernel only sometimes."""
        if self.shared_keys is not None:
            self.shared_keys.end()
            if self._looks:
                self._backend.__dict__.pop(_EXTEND, None)
                self._looks = False
        if self._engines is not None:
            self._put(*self._engines[1:])
            self._engines = None

    def abandon(self) -> None:
        """Put back what the engine's method has just decided."""
        if self._engines is not None:
            self._backend.use_mha = self._engines[0]
        self.give_back()

    def _put(self, impl: str, union: Any) -> None:
        self._backend.dsa_prefill_impl = impl
        if union is not None:
            self._backend.dsa_triton_union = union

    def answer(
        self, prefix_lens: list[int], extend_lens: list[int], *, engine_mha: bool
    ) -> str | None:
        """As `Answers.of` for a batch of these lengths."""
        asked = self.answers.asked(prefix_lens, extend_lens)
        proven = self._backend.__dict__.get(PROVEN_KERNEL)
        if asked is None:
            return None
        share = (
            0.0 if self.shared_keys is None or asked.q_tokens <= _FEW else self.shared_keys.share
        )
        share = max(share - 0.25, 0.0) if asked.q_tokens <= _SOME else share
        return self.answers.of(asked, engine_mha=engine_mha, kept=share, proven=proven)

    def steer(self, forward_batch: Any) -> bool:
        """Change what the engine's method has decided, if that is worth it. Always True."""
        if not is_plain_extend(forward_batch):
            return True
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        extend_lens = forward_batch.extend_seq_lens_cpu
        backend = self._backend
        if self.shared_keys is not None and {type(prefix_lens), type(extend_lens)} == {list}:
            self.shared_keys.begin(prefix_lens, extend_lens)
            # Another plug-in may have put its own there.
            self._looks = self.shared_keys.looks and _EXTEND not in backend.__dict__
            if self._looks:
                setattr(backend, _EXTEND, partial(_looked_at, backend, self.shared_keys))
        engine_mha, engine_impl = backend.use_mha, kernel_of(backend)
        answer = self.answer(prefix_lens, extend_lens, engine_mha=engine_mha)
        mha = engine_mha if answer is None else answer == _MHA
        impl = engine_impl if mha or answer is None else answer
        if mha is not engine_mha or impl != engine_impl:
            union = getattr(backend, "dsa_triton_union", None)
            self._engines = (engine_mha, backend.dsa_prefill_impl, union)
            kernel, _, four = impl.partition("_union")
            backend.use_mha = mha
            self._put(kernel, int(four or 0) if kernel == TRITON else None)
        own = {"prefill_path": _path(engine_mha), "sparse_prefill": engine_impl}
        self.note(forward_batch, own, {"prefill_path": _path(mha), "sparse_prefill": impl})
        return True

    def note(self, forward_batch: Any, own: Mapping[str, str], taken: Mapping[str, str]) -> None:
        """Log a pass that is served, if that is asked for and due."""
        if self._log is None or MADE_UP in self._backend.__dict__:
            return
        if count := self._log.due():
            lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
            if batch := batch_of(*lens):
                self._log.write(count, batch, own=own, taken=taken, table=self.answers.table)


def _looked_at(backend: Any, shared_keys: SharedKeys, *given: Any, **named: Any) -> Any:
    """What each layer of one pass calls in place of `backend.forward_extend`."""
    attempt("looking at a selection", shared_keys.look, named.get("topk_indices"))
    return getattr(type(backend), _EXTEND)(backend, *given, **named)


def _path(mha: bool) -> str:
    return "mha" if mha else "mla"
