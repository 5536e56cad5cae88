"""When an engine has started: each way to run a pass is compared, timed if need be, and used."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from nsa_tune import __version__
from nsa_tune.backend.baselines.sglang_0_5_23 import V4_GRAPHS
from nsa_tune.backend.hardware.detect import cpu_name
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang import attempt, say_once
from nsa_tune.engines.sglang.eligible import Engine, why_not
from nsa_tune.engines.sglang.facts import facts_of, index_topk_of
from nsa_tune.engines.sglang.pass_mode.calibration import (
    MEASURED,
    Case,
    cases,
    contexts,
    measure,
)
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.proof import prove, sentinels
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.seconds import spent
from nsa_tune.engines.sglang.pass_mode.steering.monitor import RegressionMonitor
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.times.priors import (
    anchors,
    chosen_alike,
    kernel_place,
    missing,
    place_of,
    prior,
    rescaled,
)
from nsa_tune.engines.sglang.pass_mode.verdicts import verdicts_of
from nsa_tune.engines.sglang.pass_mode.whole_pass.capture import captured, captured_mib
from nsa_tune.engines.sglang.prefill import chosen, detach, leave_out, source_of
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.releases import installed_release, installed_version
from nsa_tune.engines.sglang.switch import SWITCHES, Part, switch_is_on
from nsa_tune.engines.symbols import Symbol, hooks_on

STEERING = "_nsa_tune_pass_mode"
"""Attribute of a ModelRunner whose passes are steered."""
_ARGUMENTS = (
    "dtype", "quantization", "load_format", "moe_runner_backend", "ep_size", "nnodes",
    "disable_custom_all_reduce", "enforce_disable_flashinfer_allreduce_fusion",
    "enable_torch_symm_mem", "enable_mscclpp",
)  # fmt: skip
"""SGLang's arguments that change what the layers take besides attention."""
_SHARING = (
    "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "indexer_types",
    "cli_factor",
)  # fmt: skip
"""Fields of a model's config by which layers reuse another's selection."""
_DECIDE = frozenset({"forward", "can_run", "prepare_metadata", "replay"})
"""Hooks without which a rank would run a pass otherwise than it decides."""


def attach(runner: Any) -> None:
    """Have the passes of a ModelRunner steered, if nothing speaks against it on any rank."""
    import torch

    if runner.is_draft_worker:
        return
    reason = _why_not(runner)
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    ranks = Ranks(runner)
    if reason is not None:
        say_once(logging.INFO, f"SGLang decides by itself how prefills run: {reason}")
        ranks.agree("pass_mode", None)
        return
    # All that may fail on one rank alone, for from here on they wait for each other.
    key, steering = _key(runner, graphs), _steering(runner, ranks)
    said = f"{__version__}: {key!r}, {[*sentinels(runner)]!r}"
    if not ranks.agree("pass_mode", said):
        text = f"SGLang decides how prefills run: its ranks do not agree, and this one says {said}"
        say_once(logging.WARNING, text)
        return
    with ExitStack() as undo:
        setattr(runner, STEERING, steering)
        undo.callback(delattr, runner, STEERING)
        times = ranks.together(
            "proving how passes run", lambda: _proven(runner, steering, ranks, key)
        )
        if times is None:
            text = "SGLang decides how prefills run: another rank has proven nothing"
            say_once(logging.WARNING, text)
            return
        undo.pop_all()
    steering.times = times
    steering.monitor = RegressionMonitor(lambda: torch.cuda.Event(enable_timing=True))


def drop_unproven_table(runner: Any) -> None:
    """In a release that the plug-in does not know, the table has a say only where that was proven.

    Call it when `attach` has come to its end.
    """
    release = installed_release()
    if release is None or release.known or runner.is_draft_worker:
        return
    steering: Steering | None = runner.__dict__.get(STEERING)
    if steering is None or PassMode.TABLE_KERNEL in steering.off:
        detach(runner.attn_backend)


def _why_not(runner: Any) -> str | None:
    """Why all passes of a model runner run as SGLang has them; None where they need not."""
    engine = Engine.of(runner)
    reason = why_not(Part.PASSES, engine)
    if reason is None:
        try:
            facts_of(runner.attn_backend, runner)
        except LeftAlone as error:
            return str(error)
    elif not hasattr(engine.graphs, "capture_num_tokens"):
        named = getattr(runner.model_config.hf_config, "architectures", None) or ()
        return f"{reason}. {V4_GRAPHS}" if "DeepseekV4ForCausalLM" in named else reason
    return reason


def _row_graphs(runner: Any) -> RowGraphs | None:
    """The decode graphs that may run a prefill."""
    reason = why_not(Part.DECODE_GRAPHS, Engine.of(runner))
    if reason is None:
        return RowGraphs.of(runner)
    say_once(logging.INFO, f"no prefill runs by decode graphs: {reason}")
    return None


def _steering(runner: Any, ranks: Ranks) -> Steering:
    graphs = captured(runner.prefill_cuda_graph_runner)
    index_topk, decode = index_topk_of(runner.attn_backend), _row_graphs(runner)
    return Steering(runner, index_topk, ranks, graphs=graphs, decode=decode)


def _proven(runner: Any, steering: Steering, ranks: Ranks, key: Mapping[str, object]) -> PassTimes:
    """What passes take in the ways that are right here; all others are off from now on."""
    import torch

    before = _peak_from_now()
    with spent("comparing passes"):
        proof = prove(runner, steering, ranks)
    steering.off = frozenset(mode for mode in PassMode if mode in proof.wrong)
    leave_out(runner.attn_backend, proof.wrong)
    with spent("timing passes"):
        times = _times(runner, steering, ranks, key)
    # All ranks go by rank 0's times, and so find the same ways slow.
    verdicts = verdicts_of(steering.choice, times, proof)
    steering.off = frozenset(
        mode for mode in PassMode if mode in verdicts and not verdicts[mode].on
    )
    peak_mib = (torch.cuda.max_memory_allocated() - before) >> 20
    # Batches and what they were run with refer to each other.
    gc.collect()
    torch.cuda.empty_cache()
    sentences = {str(mode): str(verdict) for mode, verdict in verdicts.items()}
    times = times.with_verdicts(sentences, peak_mib)
    if ranks.rank == 0:
        attempt("keeping times of passes", remembered.save, times)
    ways = "; ".join(f"{mode} {sentence}" for mode, sentence in sentences.items())
    say_once(
        logging.INFO,
        f"how prefills run: {ways}; comparing and timing took up to {peak_mib} MiB, which are "
        f"released ({SWITCHES[Part.PASSES]}=0 leaves this to SGLang)",
    )
    return times


def _times(runner: Any, steering: Steering, ranks: Ranks, key: Mapping[str, object]) -> PassTimes:
    """What passes take here: as remembered from an earlier start, or measured now."""
    # Which passes run to be timed follows from these, so they are rank 0's on all. What one rank
    # alone does must not raise: the others would wait for it, or steer without it.
    table = ranks.from_first(source_of(runner.attn_backend))
    first = ranks.rank == 0
    read = attempt("reading times of passes", _known, key) if first else None
    known, own = ranks.from_first(read) or (PassTimes({}, ()), False)
    topk = steering.choice.index_topk
    wanted = {case.unmeasured(topk): case for case in cases(runner, steering, known.key)}
    asked = attempt("asking for the table's kernels", _kernels, runner, wanted) if first else None
    kernels = ranks.from_first(asked) or {}
    for time in [time for time in wanted if time.mode is PassMode.TABLE_KERNEL]:
        if kernel_place(time) not in kernels:
            del wanted[time]
    memory_mib = {"whole-pass graphs": captured_mib(runner.prefill_cuda_graph_runner)}
    time_some = partial(_measured, runner, steering, ranks)
    measured = _by_known(known, wanted, kernels, ranks, time_some, own=own)
    return ranks.from_first(PassTimes(key, measured, table, memory_mib, kernels=kernels))


def _known(key: Mapping[str, object]) -> tuple[PassTimes, bool] | None:
    """Times that may hold for this engine, and whether they are its own, which do."""
    own = remembered.load(key)
    known = own or prior(key)
    return None if known is None else (known, own is not None)


def _kernels(runner: Any, wanted: Mapping[PassTime, Case]) -> dict[str, str]:
    """What the table chooses for passes to measure, but where it leaves them to SGLang."""
    found = {}
    for time, case in wanted.items():
        if time.mode is PassMode.TABLE_KERNEL:
            kernel = chosen(runner.attn_backend, [case.prefix] * len(case.lens), [*case.lens])
            if kernel is not None:
                found[kernel_place(time)] = kernel
    return found


def _measured(
    runner: Any, steering: Steering, ranks: Ranks, some: Sequence[Case]
) -> list[PassTime]:
    if not some:
        return []
    measured = ranks.together("timing passes", lambda: measure(runner, steering, some))
    if measured is None:
        raise RuntimeError("another rank could not time its passes")
    return measured


def _by_known(
    known: PassTimes,
    wanted: Mapping[PassTime, Case],
    kernels: Mapping[str, str],
    ranks: Ranks,
    time_some: Callable[[Sequence[Case]], list[PassTime]],
    *,
    own: bool,
) -> list[PassTime]:
    """The known times as far as they hold here, and what else is wanted."""
    there, some = chosen_alike(known, kernels), missing(known, wanted, kernels)
    if not own:
        modes, places = {time.mode for time in wanted}, set(map(place_of, wanted))
        there = [time for time in there if time.mode in modes]
        some |= anchors(time for time in there if place_of(time) in places)
    checked = time_some([case for time, case in wanted.items() if place_of(time) in some])
    if own:
        say_once(logging.INFO, f"{len(there)} times of passes are known from an earlier start")
        return there + checked
    times = ranks.from_first(rescaled(there, checked))
    if times is not None:
        text = f"{len(checked)} passes take what an engine of SGLang {known.key.get('sglang')} took"
        say_once(logging.INFO, f"{text}, so its times are taken for the rest")
        return times
    return checked + time_some([wanted[time] for time in wanted if place_of(time) not in some])


def _peak_from_now() -> int:
    """Forget the highest use of memory so far; bytes in use now."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _key(runner: Any, graphs: Any) -> dict[str, object]:
    """What measured times are valid for."""
    import torch

    facts = facts_of(runner.attn_backend, runner)
    config = getattr(runner.model_config, "hf_text_config", None)
    decode = _row_graphs(runner)
    return {
        "gpu": torch.cuda.get_device_name(),
        # What a pass takes on the host is its.
        "cpu": cpu_name().removeprefix("CPU "),
        "torch": torch.__version__,
        "sglang": installed_version(),
        "plug_in": __version__,
        "model": facts.profile.name,
        "layers": facts.layers,
        "heads": facts.heads,
        "kv_dtype": facts.kv_dtype,
        "prefill_impl": facts.impl,
        "decode_impl": str(getattr(runner.attn_backend, "dsa_decode_impl", facts.impl)),
        "hidden_size": runner.model_config.hidden_size,
        **{name: str(getattr(config, name, None)) for name in _SHARING},
        "tp_size": runner.server_args.tp_size,
        # Not whether it is faster: later starts may find that differently.
        "topk": switch_is_on(Part.TOPK),
        "decode": switch_is_on(Part.DECODE),
        "copies": switch_is_on(Part.COPIES),
        **{name: str(getattr(runner.server_args, name, None)) for name in _ARGUMENTS},
        "prefill_sizes": sorted(graphs.capture_num_tokens),
        "decode_sizes": [] if decode is None else decode.sizes,
        # None without speculative decoding.
        "draft_tokens": runner.attn_backend.speculative_num_draft_tokens,
        "whole_pass_sizes": {str(mode): of.sizes for mode, of in captured(graphs).items()},
        "contexts": contexts(runner),
        "context_len": runner.model_config.context_len,
        "measured": MEASURED,
        # A rank without one of them would not run what it has agreed to.
        "hooks": _hooks(),
    }


def _hooks() -> list[str]:
    """The plug-in's hooks that are in place, of those that decide how a pass runs."""
    release = installed_release()
    return [
        symbol.name
        for symbol in (() if release is None else release.symbols)
        if symbol.name in _DECIDE and symbol.module in sys.modules and hooks_on(_method(symbol))
    ]


def _method(symbol: Symbol) -> object:
    owner, _, name = symbol.path.rpartition(".")
    return getattr(getattr(sys.modules[symbol.module], owner, None), name, None)
