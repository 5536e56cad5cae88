"""Options of `replay` and `advise`: the engine and its flags, the traffic, the table."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nsa_tune._cli.shared.console import say
from nsa_tune._cli.shared.gpus import gpu_and_model
from nsa_tune._cli.shared.option_groups import DispatcherOptions
from nsa_tune._cli.shared.options import Engine, KvDtype, heads_of, known_model
from nsa_tune._errors import NsaTuneError, UsageError
from nsa_tune.autotune.workload.weighted_batches import is_decision_log
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.profiles import PROFILES, REUSING
from nsa_tune.reports.traffic.deployment import Deployment, EngineSettings, Traffic
from nsa_tune.reports.traffic.launch import VALUED, Launch

_NoSuchOption: Any = sys.modules[typer.BadParameter.__module__].NoSuchOption
"""Of Click's, or of the copy of it that newer Typers bring."""


class PricingCommand(TyperCommand):
    """A command that takes an engine's flags as a text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments; UsageError for an unknown option, which may be a flag of the engine."""
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except _NoSuchOption as error:
            # Of -tp the error names the first letter.
            at = [error.option_name in (w.split("=")[0], w[:2]) for w in typed].index(True)
            flag = typed[at].split("=")[0]
            words = shlex.join(typed[at : at + 1 + (typed[at] in VALUED)])
            alike = ", ".join(() if flag in VALUED else error.possibilities or ())
            raise UsageError(
                f"{flag} is no option of {ctx.info_name}{alike and f' (it has {alike})'}; a flag "
                f'of the engine goes into --flags "{words}"'
                + ", or write -- before the whole launch command"
                * (ctx.info_name == "advise")
            ) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; where it has no answer, tell what was left out before the error."""
        try:
            return super().invoke(ctx)
        except NsaTuneError:
            engine, words = ctx.params.get("engine", "sglang"), ctx.params.get("words") or ()
            launch = Launch.parse(str(engine), f"{ctx.params['flags']} {shlex.join(words)}")
            for text in launch.misspelled.values():
                say(text)
            raise


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that say which engine serves which traffic."""

    flags: Annotated[
        str,
        typer.Option(
            "--flags",
            help='The engine\'s flags in use: "--tp 8 --kv-cache-dtype fp8_e4m3". Answers start '
            "from them; kernels, KV format, chunk size, drafts and parallelism are read.",
        ),
    ] = ""
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Default: all.")] = None
    speed: Annotated[
        float,
        typer.Option("--speed", min=1e-6, help="How much faster than in the trace requests come."),
    ] = 1.0
    acceptance: Annotated[
        float, typer.Option("--acceptance", min=0, max=1, help="Share of drafted tokens accepted.")
    ] = 0.7
    version: Annotated[str | None, typer.Option("--engine-version", help="Default: newest.")] = None
    pass_times: Annotated[
        Path | None,
        typer.Option(
            "--pass-times",
            help="File of whole passes measured in an engine. Default: the newest that the plug-in "
            "kept for this GPU, model, heads and KV format, else those that ship.",
        ),
    ] = None

    def with_flags(self, more: str) -> EngineOptions:
        """With more flags of the engine."""
        return replace(self, flags=f"{self.flags} {more}")

    def traffic(self, path: Path | None) -> Traffic:
        """What is served: a trace's requests, or a decision log's batches."""
        log = path if path is not None and is_decision_log(path) else None
        return Traffic(None if log else path, log, self.requests, self.speed)


@dataclass(frozen=True, slots=True)
class PricingOptions(DispatcherOptions):
    """Options that choose the table; what is not given is this machine's, or in --flags."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            callback=known_model,
            help=f"Model: {', '.join(['deepseek-v3.2', 'glm-5', *REUSING])}. advise also takes "
            "deepseek-v3 and kimi-k2.",
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option("--kv-dtype", help="Format of the KV pool. Default: by --flags, else bf16."),
    ] = None  # type: ignore[assignment]

    def named(self, launch: Launch) -> PricingOptions:
        """With the model that a launch command names; UsageError when it is not known."""
        model = self.model or known_model(launch.value("model"))
        if self.model is None and model not in (None, *PROFILES, *REUSING):
            raise UsageError(f"{model} names no known model: add one's name, --model deepseek-v3.2")
        return replace(self, model=model)

    def dense(self, launch: Launch, *unread: object) -> Dispatcher:
        """The table of a model that runs dense MLA; UsageError when any of `unread` is given."""
        if any(option is not None for option in unread):
            raise UsageError(
                f"passes of {self.model} are not priced, so no goal is looked for: without "
                "one, advise says what the engines' thresholds lose in attention"
            )
        heads = self.heads or heads_of(None, self.model or "") // (launch.number("tp") or 1)
        return replace(self, heads=heads, kv_dtype=self.kv_dtype or KvDtype.BF16).open()

    def deployment(
        self, engine: Engine, options: EngineOptions, *, kv_dtype: str | None = None
    ) -> Deployment:
        """The engine with its flags; `kv_dtype` overrides what they and --kv-dtype say.
        UsageError when flags and options contradict each other, NoTunedData without a table."""
        launch = Launch.parse(str(engine), options.flags)
        launch = launch.without(*launch.misspelled, *(["kv", "kernels"] if kv_dtype else []))
        served = self.named(launch).model
        shapes = REUSING.get(served or "", (served,))[0]
        gpu, model = gpu_and_model(self.gpu, shapes, self.heads, self.database)
        if self.gpu is None and gpu.startswith("CPU"):
            raise UsageError("this machine has no GPU: name the one that serves, as in --gpu H200")

        def dispatcher(heads: int, kv_dtype: str) -> Dispatcher:
            key = replace(self, gpu=gpu, model=model, heads=heads, kv_dtype=KvDtype(kv_dtype))
            return key.open()

        settings = EngineSettings(options.version, options.pass_times, options.acceptance)
        return Deployment(
            dispatcher, launch, served or model, heads=self.heads,
            kv_dtype=kv_dtype or (self.kv_dtype and str(self.kv_dtype)), settings=settings,
        )  # fmt: skip
