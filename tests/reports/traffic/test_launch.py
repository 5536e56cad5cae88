"""Launch commands: flags are read as they are typed, and only what should change is changed."""

from __future__ import annotations

import shlex

import pytest

from nsa_tune import UsageError
from nsa_tune.reports.traffic.launch import Launch


def test_flags_are_read_as_they_are_typed() -> None:
    launch = Launch.parse("sglang", "--tp=8 --kv-cache-dtype fp8_e4m3 --disable-cuda-graph A=b")

    assert launch.number("tp") == 8
    assert launch.kv_dtype == "fp8"
    assert not launch.graphs
    assert launch.flags["A"] == "b"


def test_the_command_keeps_every_flag_and_can_be_typed() -> None:
    launch = Launch.parse("sglang", "NAME='two words' --tp 8 --trust-remote-code --port 30000")

    assert shlex.split(launch.command("deepseek-v3.2")) == [
        "NAME=two words", "python", "-m", "sglang.launch_server", "--model-path",
        "deepseek-ai/DeepSeek-V3.2", "--tp", "8", "--trust-remote-code", "--port", "30000",
    ]  # fmt: skip


def test_vllms_command_has_its_own_words() -> None:
    launch = Launch.parse("vllm", "--tensor-parallel-size 8 --max-num-batched-tokens 4096")

    assert launch.number("chunk") == 4096
    assert launch.command("glm-5").startswith("vllm serve zai-org/GLM-5-FP8 --tensor-parallel-size")


def test_a_model_that_is_given_is_served() -> None:
    assert "--model-path /my/model --tp 8" in Launch.parse(
        "sglang", "--tp 8 --model-path /my/model"
    ).command("deepseek-v3.2")


def test_heads_are_split_unless_attention_is_data_parallel() -> None:
    assert Launch.parse("sglang", "--tp 8 --dp 8").dp_attention == 1
    assert Launch.parse("sglang", "--tp 8 --dp 8 --enable-dp-attention").dp_attention == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 'eight", "cannot be read"),
        ("--tp eight", "no whole number"),
        ("--kv-cache-dtype int4", "is not priced"),
        ("--kv-cache-dtype fp8", "use one of auto, bfloat16, bf16, fp8_e4m3"),
        ("--dp two", "no whole number"),
        ("--mem-fraction-static 1.5", "not between 0 and 1"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_with_a_sentence(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launch = Launch.parse("sglang", flags)
        _ = launch.number("tp"), launch.kv_dtype, launch.fraction, launch.dp_attention


def test_a_flag_that_looks_like_one_that_is_read_is_told() -> None:
    launch = Launch.parse(
        "sglang", "--kv_cache_dtype auto --pp-size 2 --tp-size 8 --disable-radix-cache"
    )

    (told,) = launch.misspelled.items()
    assert told[0] == "--kv_cache_dtype"
    assert told[1].endswith("did you mean --kv-cache-dtype?")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--cuda-graph-bs 1 2 4 --tp 8", "--cuda-graph-bs 1 2 4 --tp 8"),
        ("--tp 8 --json-args '{\"a\": 1}'", "--tp 8 --json-args '{\"a\": 1}'"),
        ("docker run --gpus all -p 3:3 img python3 -m sglang.launch_server --tp 8", "--tp 8"),
        ("python -m sglang.launch_server --tp 8 \\\n  --port 3", "--tp 8 --port 3"),
    ],
)
def test_a_command_keeps_all_that_the_engine_was_given(text: str, flags: str) -> None:
    command = Launch.parse("sglang", text).command("deepseek-v3.2")

    start = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.2"
    assert command == f"{start} {flags}"
