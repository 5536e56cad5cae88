"""The options of a run, and what they mean to SGLang."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import STATE_CASES
from benchmarks.engine.placing import FAULTS

__all__ = ["KV_DTYPES", "engine_arguments", "fill_in", "model_folder", "set_environment"]

KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8"}
"""SGLang's name of a KV dtype (on Hopper) to nsa-tune's."""

_MODELS = {one.stem: one for one in sorted(Path(__file__).with_name("models").glob("*.json"))}
"""By model, the file of its published config.json, with weights in fp8, scaled in blocks (those of
V4's experts, too, which are published in fp4)."""
_GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
_KIMI_K2 = {"num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
_VARIANTS = {"glm-5.2": ("glm-5", _GLM_5_2), "kimi-k2": ("deepseek-v3", _KIMI_K2)}
"""By model, another that is shaped alike, and how its config.json differs."""
_ACCEPTED = 0.8
"""Chance that a draft token is accepted when the one before it was: an assumption, near what
DeepSeek reports for its MTP layer."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What is fixed when the engine starts."""
    add = parser.add_argument_group("engine").add_argument
    add("--kv", default="auto", choices=sorted(KV_DTYPES), help="KV cache dtype")
    add("--model", default="deepseek-v3.2", choices=[*_MODELS, *_VARIANTS], help="whose shapes run")
    add("--layers", type=int, help="default: all of the model's")
    add("--dense", type=int, default=3, help="layers with a dense MLP (first_k_dense_replace)")
    add("--heads", type=int, help="local heads; default: the model's over --tp")
    add("--tp", type=int, default=8, help="one rank's shapes: experts and MLPs cut, no all-reduce")
    add("--ep", type=int, default=1, help="one rank's experts: of so many that share them whole")
    add("--as-layers", type=int, help="what nsa-tune is told; 0: the truth; default: the model's")
    add("--chunk", type=int, help="chunked_prefill_size; SGLang's own where not given")
    add("--prefill-graph", default="8192", help="default, off, or the most tokens")
    add("--prefill-sizes", default="64,128,256,512,1024,2048,4096,8192", help="captured sizes")
    add("--decode-sizes", default="1,8,32,64,128", help="captured batch sizes")
    add("--spec", default="", help="MTP: steps/topk/draft tokens, such as 1/1/2 or 3/1/4")
    add(
        "--accept", type=float,
        help="simulated tokens a verify step, the bonus token included; 0: what is really accepted",
    )  # fmt: skip
    add("--real-tp", type=int, default=1, help="GPUs of the engine (real tensor parallelism)")
    add("--real-dp", type=int, default=1, help="more than 1: data-parallel attention")
    add("--fault", default="", choices=["", *FAULTS], help="what goes wrong on the last rank")
    add("--mem", type=float, default=0.85, help="mem_fraction_static")
    add("--max-total", type=int, default=300_000, help="tokens in the KV pool")
    add("--engine", default="{}", help="more engine arguments, as a JSON object")
    add("--log-level", default="warning")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    add = parser.add_argument_group("run").add_argument
    add(
        "--tests", default="prefill,decode,trace,outputs",
        help="also: loaded, profile, ranks, soak, states; NAME:0.5 has half of the time left",
    )  # fmt: skip
    add("--configurations", default="", help="a JSON list, or names of the built-in ones")
    add("--no-plugin", action="store_true", help="start with NSA_TUNE_DISABLE=1")
    add("--seconds", type=float, default=480, help="no new case after so long, the start included")
    add("--out", type=Path, default=Path("/tmp/sgl/out"))
    add("--label", default="", help="what to call this engine in a comparison")
    add("--commit", default="", help="nsa-tune's commit; asked of git where not given")
    add("--grid", default="", help="prefix:new:sequences,... in place of the built-in grid")
    add("--batches", type=Path, help='jsonl of {"prefix": [...], "new": [...]}, after the grid')
    add("--prefill-configurations", default="", help="names; default: all")
    add("--repeat", type=int, default=6, help="sweeps over the configurations; 6 for an interval")
    add("--decode-batches", default="1,8,32,64,128:2048", help="sequences[:context],...")
    add("--decode-context", type=int, default=4096)
    add("--decode-tokens", type=int, default=24, help="new tokens of each request")
    add("--decode-configurations", default="", help="names; default: the default and the plug-in")
    add(
        "--trace", type=Path, action="append", default=[],
        help="jsonl, or FILE=configurations=SHARE of repeated tokens=rounds, as many as needed",
    )  # fmt: skip
    add("--requests", type=int, default=64, help="the first so many of a trace")
    add("--longest", type=int, default=32768, help="leave out requests with longer prompts")
    add("--out-tokens", type=int, default=16, help="at most so many new tokens a request")
    add("--concurrency", type=int, default=16)
    add("--rounds", type=int, default=2, help="of each trace and configuration")
    add("--outputs", type=int, default=200, help="requests whose greedy tokens are compared")
    add(
        "--output-configurations", default="",
        help="names, also of states; default: those with the plug-in",
    )  # fmt: skip
    add("--state-cases", default=STATE_CASES, help="prefix:new:sequences,... of the test of states")
    add(
        "--within", type=float, default=0.0,
        help="after two sweeps go on with what took at most so many times the least; 0: all",
    )  # fmt: skip
    add("--profile-cases", default="", help="as --grid; default: the batches of prefill")
    add("--host-cases", type=int, default=3, help="batches with a profile of Python, too")
    add("--load", type=int, default=16, help="busy processes in the test loaded")
    add("--loaded-cases", type=int, default=10)
    add("--loaded-configurations", default="", help="names; default: all")
    add("--rank-passes", type=int, default=2000, help="of each rank, in the test of ranks")
    add("--soak-seconds", type=float, default=60)
    add("--soak-table", type=Path, help="the table that is replaced while serving")


def fill_in(options: argparse.Namespace) -> argparse.Namespace:
    """`options`, filled in by the model where nothing was given."""
    config = _config(options.model)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"] // options.tp
    for name, value in (("layers", layers), ("heads", heads), ("as_layers", layers)):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _config(model: str) -> dict[str, Any]:
    name, changes = _VARIANTS.get(model, (model, {}))
    return dict(json.loads(_MODELS[name].read_text())) | changes


def model_folder(options: argparse.Namespace, parent: Path) -> Path:
    """A folder with the config.json of one rank of the model, made below `parent`."""
    config = _config(options.model)
    config |= {"num_hidden_layers": options.layers, "first_k_dense_replace": options.dense}
    heads = options.heads * options.real_tp // options.real_dp
    kv_heads = min(heads, config["num_key_value_heads"])  # V4's queries share one.
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config["n_routed_experts"] //= options.ep
    for name in {"intermediate_size", "moe_intermediate_size"} & config.keys():
        config[name] = config[name] * options.real_tp // options.tp
    if "compress_ratios" in config:
        config["compress_ratios"] = config["compress_ratios"][: options.layers]
    folder = parent / f"{options.model}-{options.layers}-{options.dense}-{heads}-{options.tp}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def engine_arguments(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The keyword arguments of `sglang.Engine`."""
    named: dict[str, Any] = {
        "model_path": str(model), "load_format": "dummy", "skip_tokenizer_init": True,
        "kv_cache_dtype": options.kv, "mem_fraction_static": options.mem,
        "max_total_tokens": options.max_total,
        "max_running_requests": max(256, *(_sizes(options.decode_sizes) or [0])),
        "sampling_backend": "pytorch", "grammar_backend": "none", "random_seed": 1,
        "cuda_graph_bs_decode": _sizes(options.decode_sizes), "log_level": options.log_level,
        "watchdog_timeout": 1200, "mm_feature_transport": "cpu",
    }  # fmt: skip
    named |= {"chunked_prefill_size": options.chunk} if options.chunk else {}
    named |= _graphs(options) | _ranks(options) | _speculation(options.spec)
    return named | dict(json.loads(options.engine))


def _sizes(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def _graphs(options: argparse.Namespace) -> dict[str, Any]:
    if options.prefill_graph == "off":
        return {"disable_prefill_cuda_graph": True}
    most, sizes = options.prefill_graph, _sizes(options.prefill_sizes)
    named: dict[str, Any] = {} if most == "default" else {"cuda_graph_max_bs_prefill": int(most)}
    return named | ({"cuda_graph_bs_prefill": sizes} if sizes else {})


def _ranks(options: argparse.Namespace) -> dict[str, Any]:
    shared = {"dp_size": options.real_dp, "enable_dp_attention": True}
    return {"tp_size": options.real_tp} | (shared if options.real_dp > 1 else {})


def _speculation(spec: str) -> dict[str, Any]:
    if not spec:
        return {}
    steps, topk, drafts = (int(number) for number in spec.split("/"))
    return {
        "speculative_algorithm": "NEXTN", "speculative_num_steps": steps,
        "speculative_eagle_topk": topk, "speculative_num_draft_tokens": drafts,
    }  # fmt: skip


def simulated_acceptance(options: argparse.Namespace) -> dict[str, str]:
    """Variables that make SGLang accept as many drafts as a trained draft layer would."""
    if not options.spec or options.accept == 0:
        return {}
    steps = int(options.spec.split("/")[0])
    accepted = options.accept or sum(_ACCEPTED**i for i in range(steps + 1))
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(round(accepted, 3)),
        # Otherwise all sequences go on with the same token, and so to the same experts.
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


def set_environment(options: argparse.Namespace) -> None:
    """The variables of this process, which the engine's processes inherit."""
    os.environ |= simulated_acceptance(options)
    if options.no_plugin:
        os.environ["NSA_TUNE_DISABLE"] = "1"
