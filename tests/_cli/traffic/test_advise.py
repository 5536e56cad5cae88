"""advise: one answer that starts from the flags in use, fits, and can be typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._cli.shared.options import known_model
from nsa_tune.reports.traffic.advice import Outcome, keeping_up
from nsa_tune.reports.traffic.answer import interval, which
from nsa_tune.reports.traffic.served import Served
from tests.reports.traffic.deployments import H200, LONG_PROMPTS, SHORT_PROMPTS, write_trace
from tests.shell import Result, Shell

BF16 = "--tp 8 --kv-cache-dtype bfloat16"
FP8 = "--tp 8 --kv-cache-dtype fp8_e4m3"
COMMAND = re.compile(r"^    (python -m sglang\.launch_server .*)$", re.MULTILINE)


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `advise` for an H200 with the tables that ship."""
    shell = Shell(capsys)

    def run(*arguments: str) -> Result:
        return shell("advise", "--gpu", H200, *arguments)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "trace.jsonl", LONG_PROMPTS))


@pytest.fixture
def short(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "short.jsonl", SHORT_PROMPTS))


@pytest.fixture
def crowd(tmp_path: Path) -> str:
    """More requests than one engine serves in time."""
    requests = [(i * 0.5, 9000 + 3000 * (i % 5), 6) for i in range(60)]
    return str(write_trace(tmp_path / "crowd.jsonl", requests))


def command_of(answer: Result) -> list[str]:
    assert answer.code == 0, answer.err
    return shlex.split(COMMAND.findall(answer.out)[0])


def test_a_model_that_reuses_selections_takes_less_and_is_what_is_launched(
    advise: Any, trace: str
) -> None:
    glm_5, named, by_path = (
        advise("--trace", trace, "--json", *words)
        for words in (
            ("--model", "glm-5", "--flags", FP8),
            ("--model", "glm-5.2", "--flags", FP8),
            ("--flags", f"{FP8} --model-path zai-org/GLM-5.2-FP8"),
        )
    )
    prefills = [
        json.loads(each.out)["outcomes"][0]["prefill_s"] for each in (glm_5, named, by_path)
    ]

    # 57 of 78 layers score no keys; what is not the indexer takes as long as before.
    assert 0.5 * prefills[0] < prefills[1] < 0.95 * prefills[0]
    assert prefills[1] == prefills[2]
    assert "--model-path zai-org/GLM-5.2-FP8" in json.loads(named.out)["command"]


def test_a_chunk_size_that_is_given_stays(advise: Any, trace: str) -> None:
    words = command_of(advise("--trace", trace, "--flags", f"{FP8} --chunked-prefill-size 4096"))

    assert words[words.index("--chunked-prefill-size") + 1] == "4096"


def test_where_nothing_is_surely_faster_the_answer_is_to_keep(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace, "--flags", "--tp 8 --dsa-prefill-backend fa3")

    assert answer.out.startswith("Keep what you have")
    assert command_of(answer)[-4:] == ["--tp", "8", "--dsa-prefill-backend", "fa3"]


def test_what_does_not_fit_is_no_answer(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace, "--flags", "--tp 4")

    assert answer.out.startswith("This does not fit on 4 GPUs: the weights take 157 GiB of each")
    assert command_of(answer)[-2:] == ["--tp", "8"]
    assert "\nWhat fits:\nKeep what you have: " in answer.out
    assert not json.loads(advise("--trace", trace, "--flags", "--tp 4", "--json").out)["fits"]


def test_what_does_not_fit_names_flags_that_do_and_nothing_more(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace)

    assert answer.out.splitlines()[0].endswith('Use more: --flags "--tp 8".')
    flags = answer.out.split('"')[1]
    assert json.loads(advise("--trace", trace, "--flags", flags, "--json").out)["fits"]


def test_a_flag_has_one_price_in_use_or_not(advise: Any, trace: str) -> None:
    bf16, fp8 = (
        json.loads(advise("--trace", trace, "--flags", flags, "--json").out)["outcomes"]
        for flags in (BF16, f"{FP8} --dsa-prefill-backend flashmla_sparse")
    )

    other, given = bf16[-2], fp8[0]
    assert other["command"] == given["command"]
    assert {**other, "name": given["name"]} == given
    assert bf16[-1]["runs"] == fp8[1]["runs"]  # with the plug-in


def test_the_other_formats_row_says_its_flags(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace, "--flags", BF16)

    flags = r"python .* --dsa-prefill-backend flashmla_sparse$"
    named = "With a pool in fp8, flashmla_sparse"
    assert re.search(rf"^{named}: answers change: {flags}", answer.out, re.M)
    assert f"    {named.lower()}  " in answer.out.lower()
    assert "; fp8 with --dsa-prefill-backend flashmla_sparse.\n" in answer.out


def test_so_many_gpus_run_as_tensor_or_data_parallel_ranks(advise: Any, crowd: str) -> None:
    answer = advise("--trace", crowd, "--gpus", "17")
    first, _, ranks, *_ = answer.out.splitlines()
    split = advise("--trace", crowd, "--gpus", "17", "--heads", "16").out.splitlines()

    assert split[2] == ranks
    assert first.startswith("Try DP attention: by estimates, the least certain ones here")
    assert re.search(r" is [\d.]+ s with 2 engines\. As given, they serve \d+%\.$", first)
    assert command_of(answer)[-3:] == ["--dp", "8", "--enable-dp-attention"]
    assert ranks.startswith("TP8 or DP attention? DP attention takes fewer GPUs: TP8 needs ")
    assert advise("--trace", crowd, "--gpus", "5").out.startswith("This does not fit on 4 GPUs: ")
    glm = advise("--trace", crowd, "--gpus", "8", "--model", "glm-5").out
    assert "with DP attention it is not priced: its whole passes were not measured" in glm


@pytest.mark.parametrize("flags", [BF16, FP8])
def test_bf16_or_fp8_is_answered_right_below_the_advice(
    advise: Any, trace: str, flags: str
) -> None:
    verdict = advise("--trace", trace, "--flags", flags).out.splitlines()[1]

    assert verdict.startswith("bf16 or fp8? ")
    assert "; fp8 holds 1.6 times the tokens; with the plug-in " in verdict


def _outcome(
    ttft_s: float, tpot_s: float, pool_tokens: int = 100, engines: tuple[int, int] = (1, 1)
) -> Outcome:
    runs = [
        Served(1.0, 1.0, {"mean": factor * ttft_s}, {"mean": factor * tpot_s}, 1.0)
        for factor in (1.0, 0.8, 1.2)
    ]
    return Outcome("", "", 1.0, 1.0, pool_tokens, engines, tuple(runs), engines[1])


@pytest.mark.parametrize(
    ("bf16", "fp8", "verdict"),
    [
        ((1.0, 0.1), (1.5, 0.2), "bf16: both need 1 engine (1 GPUs); there the first token takes"),
        ((1.5, 0.2), (1.0, 0.1), "fp8: "),
        ((1.0, 0.1), (1.05, 0.105), "No sure difference, so send the trace to an engine with each"),
        ((1.0, 0.2), (1.5, 0.1), "bf16 for the first token, fp8 for the next ones: "),
        ((1.0, 0.0), (1.5, 0.0), "bf16 for the first token, unsure for the next ones: "),
    ],
)
def test_a_verdict_on_the_kv_format_needs_a_sure_difference(
    bf16: tuple[float, float], fp8: tuple[float, float], verdict: str
) -> None:
    assert which(_outcome(*bf16), _outcome(*fp8, pool_tokens=160)).startswith(verdict)


def test_without_whole_passes_no_format_is_said_to_be_better() -> None:
    attention = Outcome("", "", 1.0, 1.0, 100, (1, 1))

    assert which(attention, attention).startswith("Not known, as whole passes were not")


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        (f"{FP8} --dsa-prefil-backend fa3", "--dsa-prefill-backend"),
        ("--tp-siz 8", "--tp-size"),
        ("--model-path x/DeepSeek-V3 --tp 8 --tp-siz 4", "--tp-size"),
    ],
)
def test_a_misspelled_flag_is_told_below_the_advice_and_used_nowhere(
    advise: Any, flags: str, meant: str
) -> None:
    answer = advise("--flags", flags)
    told, name = answer.out.splitlines()[1], flags.split()[-2]

    assert told == f"{name} is left out, as no such flag is known here: did you mean {meant}?"
    assert answer.out.replace(meant, "").count(name) == 1
    assert json.loads(advise("--flags", flags, "--json").out)["left_out"] == [told]


def test_a_misspelled_flag_is_told_where_there_is_no_answer(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace, "--ttft-p90", "2s", "--", "--tp-siz", "8")

    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("--tp-siz is left out")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("advise", "--tp", "8", "--gpu", H200), '"--tp 8", or write -- before'),
        (("advise", "--engine", "vllm", "-tp", "8"), '"-tp 8", or'),
        (("advise", "--enable-dp-attention", "t.csv"), '"--enable-dp-attention", or'),
        (("replay", "t.csv", "--kv-cache-dtype=fp8_e4m3"), '"--kv-cache-dtype=fp8_e4m3"\n'),
    ],
)
def test_a_flag_of_the_engine_that_is_typed_as_an_option_is_told_its_place(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], flags: str
) -> None:
    answer = Shell(capsys)(*words)

    assert (answer.code, answer.out) == (2, "")
    assert (
        f"is no option of {words[0]}; a flag of the engine goes into --flags {flags}" in answer.err
    )


def test_a_misspelled_option_is_told_what_is_like_it(advise: Any) -> None:
    assert "--trce is no option of advise (it has --trace" in advise("--trce", "t.csv").err


@pytest.mark.parametrize(
    ("engine", "command"),
    [
        ("sglang", "python -m sglang.launch_server --model-path my/DeepSeek-V3.2 --tp 8"),
        ("vllm", "vllm serve my/DeepSeek-V3.2 -tp 8"),
    ],
)
def test_a_whole_launch_command_is_taken(advise: Any, engine: str, command: str) -> None:
    answer = advise("--engine", engine, "--", *command.split())

    assert (answer.code, answer.out) == (0, advise("--engine", engine, "--flags", command).out)
    assert answer.out.count("my/DeepSeek-V3.2") == 1
    assert f"    {command}\n" in answer.out


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/models/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("zai-org/GLM-5.2-FP8", "glm-5.2"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1"),
        (None, None),
    ],
)
def test_a_model_is_known_by_its_path(path: str | None, model: str | None) -> None:
    assert known_model(path) == model


def test_decodes_that_were_not_counted_take_no_time(advise: Any) -> None:
    rows = re.findall(r"^    as given .*$", advise("--flags", "--tp 16").out, re.M)

    assert [row.split()[-1] for row in rows] == ["-"]


def test_dense_mla_is_judged_by_the_local_heads_of_the_flags(advise: Any) -> None:
    flags = "--tp 8 --model x/DeepSeek-V3"
    assert "deepseek-v3, 16 local heads" in advise("--flags", flags).out
    assert "The trace is not read" in advise("--flags", flags, "--trace", "t.csv").out


def test_a_trace_may_be_given_without_its_option(advise: Any, short: str) -> None:
    assert "prefills" in advise(short, "--flags", FP8).out
    assert advise(f"{short}.csv", "--flags", FP8).err.endswith("No such file or directory\n")


def test_one_figure_says_how_sure_the_intervals_are(advise: Any, trace: str) -> None:
    out = advise("--trace", trace, "--flags", FP8).out

    rows = re.findall(r"^Interval (.*): all passes \d+% .*; 30 of 46 measured runs", out, re.M)
    assert ", ".join(rows).count("as given") == 1
    assert "with a pool in bf16" in rows[1]
    assert "all-reduce is not counted" in out and "never ran with" not in out
    dp = advise("--trace", trace, "--flags", f"{FP8} --dp 8 --enable-dp-attention").out
    assert "longer; 38 of 60 measured runs were inside, most others slower" in dp


def test_the_release_that_is_assumed_is_told(advise: Any) -> None:
    told = advise("--flags", f"{FP8} --pp 2").out
    assert "Engine: SGLang 0.5.23 is assumed" in told and "does less: --pp\n" in told
    older = advise("--flags", FP8, "--engine-version", "0.5.17")
    assert "Engine: SGLang 0.5.17 is assumed" in older.out
    vllm = advise("--engine", "vllm", "--flags", "--tensor-parallel-size 8")
    assert "Engine: vLLM 0.33.0 is assumed" in vllm.out


def test_so_many_engines_are_advised_as_keep_up_where_passes_take_longer() -> None:
    def counts(load: float) -> tuple[int, int]:
        return keeping_up(lambda engines, factor: max(load * factor / engines, 1.0), 1.2)

    assert [counts(load) for load in (4.9, 1.01, 0.9, 0.8)] == [(5, 6), (2, 2), (1, 2), (1, 1)]


@pytest.mark.parametrize(
    ("bf16", "fp8", "verdict"),
    [
        ((5, 6), (4, 5), "fp8 takes fewer GPUs: bf16 needs 5 to 6 engines (40 to 48 GPUs), fp8 4"),
        ((5, 6), (5, 5), "fp8 may take fewer GPUs: "),
        ((1, 2), (2, 3), "bf16 takes fewer GPUs: bf16 needs 1 to 2 engines (8 to 16 GPUs), fp8 2"),
        ((2, 2), (2, 2), "fp8: both need 2 engines (16 GPUs); there the first token takes 1.5 s"),
    ],
)
def test_of_both_formats_the_gpus_they_need_decide(
    bf16: tuple[int, int], fp8: tuple[int, int], verdict: str
) -> None:
    one, other = _outcome(1.5, 0.2, engines=bf16), _outcome(1.0, 0.1, engines=fp8)
    assert which(one, other, 8).startswith(verdict)


def test_a_queue_that_grows_has_no_time_to_first_token() -> None:
    usual, late = (Served(100.0, wall_s, {"mean": 5.0}, {}, 1.0) for wall_s in (101.0, 140.0))

    outcome = Outcome("", "", 1.0, 1.0, 100, (1, 1), (usual, usual, late))
    assert interval(outcome) == "5 s (5 s to growing)"


def test_a_flag_whose_launches_are_not_counted_is_not_ranked(advise: Any, short: str) -> None:
    assert "--disable-prefill-cuda-graph" not in advise("--trace", short, "--flags", FP8).out


@pytest.mark.parametrize("option", [("--kv-dtype", "fp8"), ("--flags", FP8)])
def test_the_kv_format_that_is_asked_for_is_priced(
    advise: Any, trace: str, option: tuple[str, str]
) -> None:
    heads = () if option[0] == "--flags" else ("--heads", "16")
    found = json.loads(advise("--trace", trace, *heads, *option, "--json").out)

    assert "fp8" in found["source"]
    assert found["outcomes"][0]["name"] == "as given"


def test_with_and_without_a_trace_the_same_flag_is_advised(advise: Any, trace: str) -> None:
    answers = [advise("--flags", FP8), advise("--flags", FP8, "--trace", trace)]

    for answer in answers:
        assert answer.out.startswith("Set --dsa-prefill-backend flashmla_sparse: ")
        assert "--kv-cache-dtype fp8_e4m3" in " ".join(command_of(answer))
    assert "give --trace for your own traffic" in answers[0].out


def test_the_plugins_gain_is_that_of_whole_passes(advise: Any, short: str) -> None:
    found = json.loads(advise("--trace", short, "--flags", "--tp 8", "--json").out)

    given, plugin = (
        next(one for one in found["outcomes"] if one["name"] == name)
        for name in ("as given", "with the plug-in")
    )
    assert found["whole_passes"]
    assert plugin["prefill_s"] < 0.9 * given["prefill_s"]
    assert plugin["runs"][0]["ttft_s"]["mean"] < given["runs"][0]["ttft_s"]["mean"]
    usual, least, most = (run["ttft_s"]["mean"] for run in given["runs"])
    assert least <= usual <= most


def test_an_overloaded_engine_is_told_how_many_keep_up(advise: Any, crowd: str) -> None:
    answer = advise("--trace", crowd, "--flags", FP8)
    found = json.loads(advise("--trace", crowd, "--flags", FP8, "--json").out)

    given, advised, _, alone, *_ = found["outcomes"]
    likely, engines = advised["engines"]
    assert alone["name"] == "one engine"
    load, _, longest = (run["wall_s"] / run["span_s"] for run in alone["runs"])
    assert engines >= likely >= load > 1
    first = answer.out.splitlines()[0]
    assert f"One engine (8 GPUs) serves {1 / load:.0%} of this load, {1 / longest:.0%} " in first
    assert f"(--speed {int(100 / longest) / 100:g}); {likely} " in first
    assert f"    as given, {given['engines'][1]} engines " in answer.out
    assert re.search(r"^    one engine +[0-9.]+ +[0-9.]+ +growing .* growing ", answer.out, re.M)
    assert advised["runs"][0]["wall_s"] < advised["runs"][0]["span_s"] + 30


def test_both_formats_need_the_same_whichever_is_typed(advise: Any, crowd: str) -> None:
    bf16, fp8 = (advise("--trace", crowd, "--flags", flags).out for flags in (BF16, FP8))
    said = [out.splitlines()[1] for out in (bf16, fp8)]

    assert said[0] == said[1]
    assert "engines (" in said[0]


def test_one_rule_says_whether_requests_queue(advise: Any, tmp_path: Path) -> None:
    busy = write_trace(tmp_path / "busy.jsonl", [(i * 0.62, 8192, 6) for i in range(200)])
    out = advise("--trace", str(busy), "--flags", FP8).out

    assert re.search(r"is \d+ ms instead of [\d.]+ s \(\d+ ms to growing\)\.$", out.splitlines()[0])
    assert "so requests queue" not in out
    assert "keeps up if it ends at most 1 % or 30 s after the last request came" in out


def test_more_gpus_than_needed_share_the_load(advise: Any, trace: str) -> None:
    rows = json.loads(advise("--trace", trace, "--gpus", "16", "--json").out)["outcomes"]

    assert {(row["shared"], *row["engines"]) for row in rows} == {(2, 1, 1)}


def test_a_decision_log_weights_its_batches(advise: Any, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    line = {
        "schema": "nsa-tune/decision/1", "time": 1.0, "gpu": H200, "model": "deepseek-v3.2",
        "heads": 16, "kv_layout": "fp8_packed", "count": 3, "batch": "extend:8192+2048",
        "own": {}, "taken": {},
    }  # fmt: skip
    log.write_text(json.dumps(line) + "\n")

    answer = advise("--trace", str(log), "--flags", FP8)

    assert answer.out.startswith("Set --dsa-prefill-backend flashmla_sparse: prefills take")
    log.write_text(json.dumps({**line, "heads": 1}) + "\n")
    assert "it has NVIDIA H200, deepseek-v3.2, 1" in advise("--trace", str(log), "--flags", FP8).err


def test_vllm_is_advised_by_attention_alone(advise: Any) -> None:
    answer = advise("--engine", "vllm", "--flags", "--tensor-parallel-size 8 --kv-cache-dtype fp8")

    assert answer.code == 0, answer.err
    assert "    vllm serve deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8" in answer.out
    assert "attention alone is compared" in answer.out


def test_a_gpu_without_engine_passes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Shell(capsys)(
        "advise", "--gpu", "NVIDIA H100 80GB HBM3", "--kv-dtype", "fp8",
        "--flags", "--tp 16 --dp 16 --enable-dp-attention",
    )  # fmt: skip

    assert answer.code == 0, answer.err
    assert "whole passes were not measured" in answer.out
    assert "The plug-in:" not in answer.out


def test_a_gpu_that_no_times_stand_for_gets_no_answer(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = Shell(capsys)("advise", "--gpu", "B200", "--flags", "--tp 8")

    assert (answer.code, answer.out) == (3, "")
    assert "no answer for NVIDIA B200: see `nsa-tune gpus`" in answer.err
    assert "the nearest table, shipped:h100-80gb-hbm3_deepseek-v3.2_h16_bf16, " in caplog.text


def test_another_gpus_times_promise_nothing_of_the_plugin(
    capsys: pytest.CaptureFixture[str], short: str
) -> None:
    answer = Shell(capsys)("advise", "--gpu", "H20", "--flags", "--tp 8", "--trace", short)

    assert answer.out.startswith(
        "Nothing was measured for NVIDIA H20, deepseek-v3.2, 16 heads, bf16: by "
    )
    assert "by times of NVIDIA H100 80GB HBM3, which may be several times off" in answer.out
    assert command_of(answer)[-2:] == ["--tp", "8"]
    assert "    with the plug-in " not in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine-version", "0.4.0"), "0.4.0"),
        (("--engine", "vllm", "--engine-version", "0.1.0"), "0.1.0"),
        (("--model", "deepseek-v4"), "takes. Prefills of V4 Flash took 42% less by --"),
        (("--model", "deepseek-v4", "--engine", "vllm"), "says what attention takes\n"),
        (("--model", "kimi-k2", "--ttft-p90", "2s"), "kimi-k2 are not priced"),
        (("--trace", "/nowhere"), "cannot be read"),
        (("--flags", "--model-path meta-llama/Llama-3"), "Llama-3 names no known model"),
        (("--flags", "--tp 8", "--gpus", "4"), "--gpus 4 is too few: one engine takes 8"),
        (("--flags", "--tp 3"), "--tp 3 does not divide deepseek-v3.2's 128 heads"),
        (("--flags", FP8, "--kv-dtype", "bf16"), "bf16 contradicts --kv-cache-dtype"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    advise: Any, arguments: tuple[str, ...], message: str
) -> None:
    answer = advise(*arguments)

    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


# --- a goal


def goal(advise: Any, *arguments: str) -> dict[str, Any]:
    answer = advise(*arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    assert found["schema"] == "nsa-tune/goal/1"
    return found


def test_the_fewest_engines_that_hold_a_goal_are_found(advise: Any, crowd: str) -> None:
    common = ("--trace", crowd, "--flags", FP8, "--ttft-p90")

    found = goal(advise, *common, "4s")["candidates"]

    assert all(one["excess"] <= 1 for one in found)
    first = found[0]
    assert 1 < first["engines"] < 20
    assert first["gpus"] == 8 * first["engines"]
    assert first["served"]["ttft_s"]["p90"] <= 4
    assert goal(advise, *common, "400s")["candidates"][0]["engines"] == 1


def test_a_goal_holds_by_an_estimate_only_if_longer_passes_break_it(
    advise: Any, crowd: str
) -> None:
    common = ("--trace", crowd, "--flags", FP8, "--ttft-p90")
    found = goal(advise, *common, "4s")
    worst = found["sure"]["served"]["ttft_s"]["p90"]
    assert worst <= 4
    assert found["sure"]["engines"] >= found["candidates"][0]["engines"]

    assert "That holds, too, if all passes take" in advise(*common, "400s").out
    least = found["candidates"][0]["served"]["ttft_s"]["p90"]
    narrow = advise(*common, f"{least * 1.0001:.6f}s").out
    assert "That is not sure: if all passes take" in narrow or "To be sure, start" in narrow


def test_where_nothing_holds_a_goal_the_nearest_is_named(advise: Any, trace: str) -> None:
    answer = advise("--trace", trace, "--flags", FP8, "--tpot", "1ms")

    assert answer.out.startswith("Nothing that is priced holds it on trace.jsonl. The nearest")
    assert re.search(r" times the limit: One engine( with the plug-in)? \(8 GPUs\), ", answer.out)
    assert COMMAND.findall(answer.out)


def test_a_kv_format_is_chosen_only_where_none_is_given(advise: Any, trace: str) -> None:
    given = goal(advise, "--trace", trace, "--flags", FP8, "--ttft-p90", "60s")
    free = goal(advise, "--trace", trace, "--flags", "--tp 8", "--ttft-p90", "60s")

    assert all("fp8_e4m3" in one["command"] for one in given["candidates"])
    assert free["candidates"][0]["excess"] <= given["candidates"][0]["excess"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ttft-p90", "2"), "write it like 2s or 30ms"),
        (("--tpot", "0ms"), "write it like 2s or 30ms"),
        (("--ttft-p90", "2s"), "needs the requests of --trace"),
    ],
)
def test_a_goal_that_cannot_be_is_refused(
    advise: Any, arguments: tuple[str, ...], message: str
) -> None:
    answer = advise("--flags", FP8, *arguments)

    assert answer.code == 2
    assert message in answer.err


def test_a_goal_stays_within_the_gpus_and_tries_dp_attention(advise: Any, crowd: str) -> None:
    words = ("--trace", crowd, "--gpus", "8", "--ttft-p90", "4s")
    out, found = advise(*words).out, goal(advise, *words)

    assert {one["gpus"] for one in found["candidates"]} == {8}
    ranks = ["--enable-dp-attention" in one["command"] for one in found["candidates"]]
    assert ranks.count(True) == 1
    assert " on crowd.jsonl with 8 GPUs" in out
    assert "(beyond the goal)" in out
    assert "- DP attention: all passes" in out


def test_a_goal_needs_whole_passes_of_a_whole_model(advise: Any, trace: str) -> None:
    flags = "--dp 8 --enable-dp-attention"
    answer = advise("--trace", trace, "--flags", flags, "--kv-dtype", "fp8", "--ttft-p90", "2s")

    assert answer.code == 3
    assert "a goal needs prices of whole passes" in answer.err


def test_a_kernel_without_times_is_refused(advise: Any, trace: str) -> None:
    for flags in (FP8, "--tp 8"):
        answer = advise("--trace", trace, "--flags", f"{flags} --dsa-prefill-backend tilelang")
        assert answer.code == 2
        assert "tilelang (sparse_prefill) is not priced" in answer.err


def test_a_machine_without_a_gpu_is_asked_which_one_serves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = Shell(capsys)("advise", "--flags", "--tp 8")

    assert answer.code == 2
    assert "name the one that serves, as in --gpu H200" in answer.err
