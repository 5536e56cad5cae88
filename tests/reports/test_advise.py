"""Advice for an engine's own settings, from tables whose best settings are known."""

from __future__ import annotations

import subprocess
from math import exp, fsum, log
from pathlib import Path

import pytest

from nsa_tune import Batch, Dispatcher, NoTunedData, UsageError
from nsa_tune.backend.integrations.sglang.releases import RELEASES
from nsa_tune.backend.records import Status, Table
from nsa_tune.backend.text_table import format_table
from nsa_tune.backend.verdict import Verdict
from nsa_tune.reports.advice import Advice, Advised
from nsa_tune.reports.advise import CAPACITY, CHUNK, DECODE, PREFILL, THRESHOLD, advise
from tests.integrations.sglang.tables import GPU, dispatcher
from tests.reports.synthetic import H100, real_table

TOPK = 2048
_BOTH = {"mha/fa3", "mla/flashmla_kv"}


def _argument(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _named(advised: Advised, name: str) -> Advice | None:
    return next((one for one in advised.advice if one.name == name), None)


def _costs(table: Dispatcher) -> dict[Batch, dict[str, float]]:
    """Batch to the measured time of each arm."""
    assert table.table is not None
    costs: dict[Batch, dict[str, float]] = {}
    for row in table.table.measurements:
        if row.point == "prefill" and row.status is Status.OK and row.latency_us is not None:
            costs.setdefault(Batch.parse(row.batch), {})[row.arm] = row.latency_us
    return costs


def _geomean(ratios: list[float]) -> float:
    return exp(fsum(map(log, ratios)) / len(ratios))


def _opened(table: Table, folder: Path) -> Dispatcher:
    path = folder / "t.tsv"
    path.write_text(format_table(table))
    return Dispatcher.open(
        path, H100.name, model="deepseek-v3.2", heads=128, kv_dtype="fp8", strict=True
    )


def test_where_mha_never_wins_the_threshold_is_zero() -> None:
    table = dispatcher("fp8", mha_us=1e6)
    found = _named(advise(table), THRESHOLD)
    assert found is not None

    # Where flashmla_kv failed, the default for MLA is not known.
    dense = [arms for arms in _costs(table).values() if arms.keys() >= _BOTH]
    gains = [arms["mha/fa3"] / arms["mla/flashmla_kv"] for arms in dense]
    assert (found.value, found.default, found.verdict) == ("0", "2048", Verdict.WIN)
    assert found.gain == pytest.approx(_geomean(gains), rel=1e-3)
    assert (found.batches, found.changed, found.worst) == (len(dense), len(dense), 1.0)
    assert found.low < found.gain < found.high


def test_where_mha_always_wins_nothing_changes() -> None:
    advised = advise(dispatcher("fp8", mha_us=1.0))

    assert _named(advised, THRESHOLD) is None
    assert _named(advised, CAPACITY) is None
    why = {one.name: one.why for one in advised.unadvised}
    assert why[THRESHOLD] == "no value gains more than 1% over the default, 2048"


def test_a_faster_kernel_is_advised_for_all_that_it_runs_on() -> None:
    table = dispatcher("fp8", sparse_us=1.0, mha_us=0.5)
    found = _named(advise(table), _argument(PREFILL))
    assert found is not None

    costs = _costs(table)
    gains = [
        arms["mla/flashmla_kv"] / arms["mla/flashmla_sparse"]
        for batch, arms in costs.items()
        if batch.max_kv > TOPK and "mla/flashmla_kv" in arms
    ]
    beyond = sum("mla/flashmla_kv" not in arms for arms in costs.values())
    assert (found.value, found.default) == ("flashmla_sparse", "flashmla_kv")
    assert found.gain == pytest.approx(_geomean(gains), rel=1e-3)
    assert found.batches == len(gains)
    assert f"flashmla_kv must not run on {beyond} more batches" in found.note


def _limits(advised: Advised) -> list[Advice]:
    """What is advised to keep batches from MHA."""
    return [one for one in advised.advice if one.name in (THRESHOLD, CAPACITY)]


def test_what_a_single_value_loses_is_said() -> None:
    (found,) = _limits(advise(dispatcher("fp8")))

    assert 0 < int(found.value) < TOPK
    assert found.gain > 1.5
    assert found.worst > 1.5
    assert Batch.parse(found.worst_batch).kv_tokens > int(found.value)
    assert 1 < found.lost < found.lost_at_worst
    assert found.lost_at_worst >= found.worst


def test_no_other_limits_are_better() -> None:
    table = dispatcher("fp8")
    found = {one.name: int(one.value) for one in _limits(advise(table))}
    dense = [(b, arms) for b, arms in _costs(table).items() if arms.keys() >= _BOTH]

    def cost(threshold: int, capacity: int) -> float:
        return _geomean(
            [
                arms["mha/fa3" if b.max_kv <= threshold and b.kv_tokens <= capacity
                     else "mla/flashmla_kv"]
                for b, arms in dense
            ]
        )  # fmt: skip

    best = min(
        cost(threshold, capacity)
        for threshold in sorted({0, *(b.max_kv for b, _ in dense)})[::3]
        for capacity in sorted({131072, *(b.kv_tokens for b, _ in dense)})[::3]
    )
    taken = cost(found.get(THRESHOLD, TOPK), found.get(CAPACITY, 131072))
    assert taken < 1.02 * best
    assert _limits(advise(table))[0].gain == pytest.approx(cost(TOPK, 131072) / taken, rel=1e-3)


def test_batches_that_are_given_decide() -> None:
    """Those on which MHA is clearly quicker are all that this user runs."""
    table = dispatcher("fp8")
    quick = [
        (batch, 5.0)
        for batch, arms in _costs(table).items()
        if "mha/fa3" in arms and arms["mha/fa3"] < 0.9 * min(
            cost for arm, cost in arms.items() if arm != "mha/fa3"
        )
    ]  # fmt: skip
    assert quick

    assert _limits(advise(table))
    advised = advise(table, None, [*quick, (Batch.decode([64]), 1e9)])
    assert not _limits(advised)
    assert advised.weights == "weighted by the batches given"


def test_an_unsure_gain_is_no_line_that_runs(tmp_path: Path) -> None:
    advised = advise(_opened(real_table(spread=9.0), tmp_path))
    unsure = [one for one in advised.advice if one.verdict is Verdict.UNSURE]

    assert unsure
    for one in unsure:
        assert one.low < 1 < one.high
        assert f"# not sure enough: {one.name}={one.value}" in list(advised.shell())


def test_only_settings_of_the_release_are_named() -> None:
    named = set()
    for kv_dtype in ("fp8", "bf16"):
        advised = advise(dispatcher(kv_dtype, mha_us=1e6))
        named |= {one.name for one in advised.advice} | {one.name for one in advised.unadvised}

    release = RELEASES[-1]
    assert named == release.environment | {_argument(one) for one in release.arguments}


def test_a_pool_with_one_kernel_has_no_choice() -> None:
    advised = advise(dispatcher("bf16"))

    why = {one.name: one.why for one in advised.unadvised}
    assert why[_argument(PREFILL)] == "nothing but flashmla_sparse was measured"
    assert why[_argument(DECODE)] == "the table has no measurements of decode attention"


def test_a_chunk_size_is_weighed_over_prompts() -> None:
    """Its kernel costs the same whatever it computes: the fewer chunks the better."""
    found = _named(advise(dispatcher("fp8", sparse_us=1.0)), _argument(CHUNK))
    assert found is not None

    assert found.value == "16384"
    assert found.default == "8192"
    assert 1.2 < found.gain <= 2
    assert "memory, latency and the other layers" in found.note


def test_the_lines_are_for_a_shell() -> None:
    advised = advise(dispatcher("fp8", sparse_us=1.0, mha_us=1e6))
    script = "\n".join([*advised.shell(), f'echo "${THRESHOLD}|$NSA_TUNE_SGLANG_ARGS"'])
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)

    threshold, _, arguments = done.stdout.strip().partition("|")
    assert threshold == "0"
    assert arguments.startswith("--dsa-prefill-backend flashmla_sparse")
    assert done.stderr == ""


def test_a_source_with_a_newline_stays_a_comment(tmp_path: Path) -> None:
    folder = tmp_path / "a\nrm -rf b"
    folder.mkdir()

    for line in advise(_opened(real_table(), folder)).shell():
        assert line.startswith(("# ", "export ", "NSA_TUNE_SGLANG_ARGS="))
        assert "\n" not in line


def test_without_a_table_there_is_no_advice() -> None:
    table = Dispatcher.open(gpu="No GPU", model="deepseek-v3.2", heads=128, kv_dtype="fp8")

    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(table)


def test_a_table_without_prefill_gives_none(tmp_path: Path) -> None:
    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(_opened(real_table(points=("indexer_layout",)), tmp_path))


def test_an_unknown_release_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"nothing is known of SGLang 0\.9\.0; known are 0\.5\.15"):
        advise(dispatcher("fp8"), "0.9.0")


def test_the_document_has_what_a_reader_needs() -> None:
    advised = advise(dispatcher("fp8"), "0.5.15")

    assert (advised.engine, advised.version, advised.gpu) == ("SGLang", "0.5.15", GPU)
    assert (advised.model, advised.heads, advised.kv_layout) == (
        "deepseek-v3.2", 128, "fp8_packed",
    )  # fmt: skip
    assert advised.weights == "each measured batch counts the same"
