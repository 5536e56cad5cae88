"""Advice for an engine's own settings, from tables whose best settings are known."""

from __future__ import annotations

import subprocess
from math import exp, fsum, log
from pathlib import Path

import pytest

from nsa_tune import Batch, Dispatcher, NoTunedData, UsageError
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.types.records import Status, Table
from nsa_tune.db.text_table import format_table
from nsa_tune.engines.sglang.releases import RELEASES
from nsa_tune.reports.advice.advice import Advice, AdviceReport, EngineOption
from nsa_tune.reports.advice.gains import BatchTimes, Change, advice_on
from nsa_tune.reports.advice.sglang import (
    CAPACITY,
    CHUNK,
    DECODE,
    KV_DTYPE,
    PREFILL,
    THRESHOLD,
    advise,
)
from tests.engines.sglang.tables import GPU, dispatcher
from tests.reports.synthetic import H100, real_table

TOPK = 2048
_BOTH = {"mha/fa3", "mla/flashmla_kv"}


def _argument(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _named(advised: AdviceReport, name: str) -> Advice | None:
    return next((one for one in advised.advice if name in _values(one)), None)


def _values(advice: Advice) -> dict[str, str]:
    return {one.name: one.value for one in advice.settings}


def _eager(table: Dispatcher, version: str | None = None) -> AdviceReport:
    """For an engine in which MHA has a say in every prefill."""
    return advise(table, version, eager_prefill=True)


def _measured(table: Dispatcher) -> list[tuple[Batch, float]]:
    """All that was measured, as if it were a workload."""
    return [(batch, 1.0) for batch in table.policies["prefill"].measured]


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
    found = _named(_eager(table), THRESHOLD)
    assert found is not None

    # Where flashmla_kv failed, the default for MLA is not known.
    dense = [arms for arms in _costs(table).values() if arms.keys() >= _BOTH]
    gains = [arms["mha/fa3"] / arms["mla/flashmla_kv"] for arms in dense]
    assert found.settings == (EngineOption(THRESHOLD, "0", "2048"),)
    assert found.verdict is Verdict.WIN
    assert found.gain == pytest.approx(_geomean(gains), rel=1e-3)
    assert (found.batches, found.changed, found.worst) == (len(dense), len(dense), 1.0)
    assert found.low < found.gain < found.high


def test_where_mha_always_wins_nothing_changes() -> None:
    advised = _eager(dispatcher("fp8", mha_us=1.0))

    assert _named(advised, THRESHOLD) is None
    assert _named(advised, CAPACITY) is None
    why = {one.name: one.why for one in advised.unadvised}
    assert why[THRESHOLD] == "no value gains more than 1% over the default, 2048"


def test_a_faster_kernel_is_advised_for_all_that_it_runs_on() -> None:
    table = dispatcher("fp8", sparse_us=1.0, mha_us=0.5)
    found = _named(_eager(table), _argument(PREFILL))
    assert found is not None

    costs = _costs(table)
    gains = [
        arms["mla/flashmla_kv"] / arms["mla/flashmla_sparse"]
        for batch, arms in costs.items()
        if batch.max_kv > TOPK and "mla/flashmla_kv" in arms
    ]
    beyond = sum("mla/flashmla_kv" not in arms for arms in costs.values())
    assert _values(found) == {
        _argument(PREFILL): "flashmla_sparse", _argument(KV_DTYPE): "fp8_e4m3",
    }  # fmt: skip
    assert "1152 bytes per kv token" in found.note
    assert found.gain == pytest.approx(_geomean(gains), rel=1e-3)
    assert found.batches == len(gains)
    assert f"on {beyond} more batches flashmla_kv is not allowed" in found.note


def _limits(advised: AdviceReport) -> Advice | None:
    """What is advised to keep batches from MHA."""
    return _named(advised, THRESHOLD) or _named(advised, CAPACITY)


def test_what_a_single_value_loses_is_said() -> None:
    found = _limits(_eager(dispatcher("fp8")))
    assert found is not None

    (value,) = map(int, _values(found).values())
    assert 0 < value < TOPK
    assert found.gain > 1.5
    assert found.worst > 1.5
    assert Batch.parse(found.worst_batch).kv_tokens > value
    assert 1 < found.lost < found.lost_at_worst
    assert found.lost_at_worst >= found.worst * (1 - 1e-9)


def test_settings_that_slow_one_batch_down_too_much_are_no_line_that_runs() -> None:
    table = dispatcher("fp8")
    advised = advise(table, batches=_measured(table), eager_prefill=True)
    found = _limits(advised)
    assert found is not None

    assert found.low > 1
    assert found.worst > 1.25
    assert found.verdict is Verdict.UNSURE
    assert not [line for line in advised.shell() if line.startswith("export")]


def test_a_gain_that_the_batches_together_do_not_have_is_not_sure() -> None:
    """Many short batches become a little faster, and a long one much slower."""
    changes = [_change(100, 90)] * 50 + [_change(9000, 10_800)]
    found = advice_on([EngineOption("--x", "1", "0")], changes, "")
    assert found is not None

    assert found.gain > 1.1
    assert found.total < 1.01
    assert found.worst == pytest.approx(1.2)
    assert found.verdict is Verdict.UNSURE
    sure = advice_on([EngineOption("--x", "1", "0")], changes[:-1], "")
    assert sure is not None
    assert sure.verdict is Verdict.WIN


def _change(before_us: float, after_us: float) -> Change:
    old, new = (Estimate(us, us * 0.99, us * 1.01, False) for us in (before_us, after_us))
    return Change(BatchTimes(Batch.extend([0], [64]), 1.0, None, {"": old, "new": new}), old, new)


@pytest.mark.parametrize(("version", "least"), [("0.5.15", 0), ("0.5.18", 2048), ("0.5.23", 8192)])
def test_limits_have_no_say_where_a_prefill_is_a_graph(version: str, least: int) -> None:
    """There the engine takes MLA, whatever the limits are."""
    table = dispatcher("fp8", mha_us=1e6)
    dense = [
        batch for batch, arms in _costs(table).items()
        if arms.keys() >= _BOTH and batch.q_tokens > least
    ]  # fmt: skip
    found = _named(advise(table, version), THRESHOLD)

    assert (found.batches if found else 0) == len(dense)
    if found and least:
        assert f"by default only above {least} new tokens" in found.note


def test_without_a_workload_a_limit_is_no_line_that_runs() -> None:
    """The measured batches were chosen to tell arms apart, not as they come."""
    table = dispatcher("fp8", mha_us=1e6)
    found = _limits(_eager(table))
    assert found is not None

    assert found.verdict is Verdict.WIN
    lines = list(_eager(table).shell())
    assert f"# {found.reservation}: {THRESHOLD}=0" in lines
    weighted = advise(table, batches=_measured(table), eager_prefill=True)
    assert f"export {THRESHOLD}=0" in list(weighted.shell())


def test_the_first_releases_run_the_sparse_kernel_otherwise_than_it_was_measured() -> None:
    table = dispatcher("fp8", sparse_us=1.0)

    assert _named(advise(table, "0.5.16"), _argument(PREFILL)) is None
    assert _named(advise(table, "0.5.17"), _argument(PREFILL)) is not None


def test_no_other_limits_are_much_better() -> None:
    table = dispatcher("fp8")
    found = _limits(_eager(table))
    assert found is not None
    values = {name: int(value) for name, value in _values(found).items()}
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
    taken = cost(values.get(THRESHOLD, TOPK), values.get(CAPACITY, 131072))
    assert taken < 1.07 * best
    assert found.gain == pytest.approx(cost(TOPK, 131072) / taken, rel=1e-3)


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

    assert _limits(_eager(table))
    batches = [*quick, (Batch.decode([64]), 1e9)]
    advised = advise(table, None, batches, eager_prefill=True)
    assert not _limits(advised)
    assert advised.weights == "weighted by the batches given"


def test_an_unsure_gain_is_no_line_that_runs(tmp_path: Path) -> None:
    advised = _eager(_opened(real_table(spread=9.0), tmp_path))
    unsure = [one for one in advised.advice if one.verdict is Verdict.UNSURE]

    assert unsure
    assert [one for one in unsure if one.low < 1 < one.high]
    for one in unsure:
        for name, value in _values(one).items():
            assert f"# not sure enough: {name}={value}" in list(advised.shell())


def test_only_settings_of_the_release_are_named() -> None:
    named = set()
    for kv_dtype in ("fp8", "bf16"):
        advised = _eager(dispatcher(kv_dtype, mha_us=1e6))
        named |= {name for one in advised.advice for name in _values(one)}
        named |= {one.name for one in advised.unadvised}

    release = RELEASES[-1]
    known = release.environment | {_argument(one) for one in release.arguments}
    assert known - named <= {_argument(KV_DTYPE)}
    assert named <= known


def test_a_pool_with_one_kernel_has_no_choice() -> None:
    advised = advise(dispatcher("bf16"))

    why = {one.name: one.why for one in advised.unadvised}
    assert why[_argument(PREFILL)] == "only flashmla_sparse was measured"
    assert why[_argument(DECODE)] == "SGLang's default for this pool is not measured"


def test_a_chunk_size_is_weighed_over_prompts() -> None:
    """Its kernel costs the same whatever it computes: the fewer chunks the better."""
    found = _named(advise(dispatcher("fp8", sparse_us=1.0)), _argument(CHUNK))
    assert found is not None

    assert found.settings == (EngineOption(_argument(CHUNK), "16384", "8192"),)
    assert found.reservation == "this counts attention alone, so test it"
    assert 1.2 < found.gain <= 2
    assert "Memory, latency and other layers" in found.note


def test_the_lines_are_for_a_shell() -> None:
    table = dispatcher("fp8", sparse_us=1.0, mha_us=1e6)
    advised = advise(table, batches=_measured(table), eager_prefill=True)
    script = "\n".join([*advised.shell(), f'echo "${THRESHOLD}|$NSA_TUNE_SGLANG_ARGS"'])
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)

    threshold, _, arguments = done.stdout.strip().partition("|")
    assert threshold == "0"
    assert arguments == "--dsa-prefill-backend flashmla_sparse --kv-cache-dtype fp8_e4m3"
    assert done.stderr == ""


def test_a_source_with_a_newline_stays_a_comment(tmp_path: Path) -> None:
    folder = tmp_path / "a\nrm -rf b"
    folder.mkdir()

    for line in _eager(_opened(real_table(), folder)).shell():
        assert line.startswith(("# ", "export ", "NSA_TUNE_SGLANG_ARGS="))
        assert "\n" not in line


def test_without_a_table_there_is_no_advice() -> None:
    table = Dispatcher.open(gpu="No GPU", model="deepseek-v3.2", heads=128, kv_dtype="fp8")

    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(table)


def test_a_table_without_prefill_gives_none(tmp_path: Path) -> None:
    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(_opened(real_table(points=("indexer_layout",)), tmp_path))


def test_batches_without_a_prefill_weight_nothing() -> None:
    with pytest.raises(UsageError, match="none of the given batches is a prefill"):
        advise(dispatcher("fp8"), batches=[(Batch.decode([64]), 1.0)])


def test_an_unknown_release_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"SGLang 0\.9\.0 is unknown; known releases: 0\.5\.15"):
        advise(dispatcher("fp8"), "0.9.0")


def test_the_document_has_what_a_reader_needs() -> None:
    advised = advise(dispatcher("fp8"), "0.5.15")

    assert (advised.engine, advised.version, advised.gpu) == ("SGLang", "0.5.15", GPU)
    assert (advised.model, advised.heads, advised.kv_layout) == (
        "deepseek-v3.2", 128, "fp8_packed",
    )  # fmt: skip
    assert advised.weights == "each measured batch counts the same"


def test_decode_kernels_that_are_measured_are_left_to_traces() -> None:
    measured = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=128, kv_dtype="bf16")

    why = {one.name: one.why for one in advise(measured).unadvised}
    assert "`nsa-tune advise --trace` compares decode kernels" in why[_argument(DECODE)]
