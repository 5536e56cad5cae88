"""Tables that lie: numbers that no machine measures, facts that no GPU has, bad models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import dist, isfinite
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.opening import Request
from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.hardware.detect import KNOWN, device_of
from nsa_tune.backend.libraries.deep_gemm.limits import metadata_rows
from nsa_tune.backend.libraries.flash_mla.limits import schedule_rows
from nsa_tune.backend.libraries.limits import bound, probed_elsewhere
from nsa_tune.backend.points import points_for
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Device, Measurement, Table
from nsa_tune.db.text_table import format_table
from tests.records import DEVICE, KEY, failed, ok, stored, table

ARMS = ("mha/fa3", "mla/flashmla_sparse", "mla/flashmla_kv")
BATCHES = [f"extend:{prefix}+{new}" for prefix in (0, 512, 1024) for new in (16, 64, 256, 1024)]


def opened(path: Path) -> Dispatcher:
    return Dispatcher.open(path, KEY.gpu, model=KEY.model, heads=KEY.heads, kv_dtype="fp8")


def written(lies: Table, path: Path) -> Path:
    path.write_text(format_table(lies))
    return path


def rows(times: Sequence[float]) -> list[Measurement]:
    """Rows whose times are `times`, over and over."""
    cells = [(batch, arm) for batch in BATCHES for arm in ARMS]
    return [
        replace(ok(batch, arm), latency_us=time, low_us=time, high_us=time)
        for (batch, arm), time in zip(cells, [*times] * len(cells), strict=False)
    ]


# --- numbers


@pytest.mark.parametrize(
    "times", [(1e-320,), (1e-308, 1e308), (1e308,), (9.9e-4, 1.0), (1.0, 1.1e9)]
)
def test_times_that_no_machine_measures_are_that_tables_trouble_alone(
    times: tuple[float, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(table(*rows(times)), tmp_path / "a.tsv")

    dispatcher = opened(path)

    assert "a.tsv" not in dispatcher.source
    assert "a latency of" in caplog.text
    assert dispatcher.reload() is None
    assert dispatcher.plan(Batch.extend([512], [64])).prefill_path in ("mha", "mla")


@given(st.lists(st.floats(1e-3, 1e9) | st.sampled_from([1e-3, 1e9]), min_size=1, max_size=36))
def test_any_times_within_the_bounds_can_be_opened_and_asked(times: list[float]) -> None:
    setting = Setting.of(table())
    for point in points_for(setting.profile):
        fitted = Policy.fit(point, setting, rows(times)).fitted
        for models in fitted.models.values():
            assert all(isfinite(each) for model in models.values() for each in model.weights)


@pytest.mark.parametrize("times", [(1e-3, 1e9), (1e9,), (1e-3,), (1.0, 1e9, 1e-3, 50.0)])
def test_times_at_the_bounds_are_read(times: tuple[float, ...], tmp_path: Path) -> None:
    dispatcher = opened(written(table(*rows(times)), tmp_path / "a.tsv"))

    assert "a.tsv" in dispatcher.source
    for batch in map(Batch.parse, BATCHES):
        assert dispatcher.plan(batch).reasons["prefill_path"].text
    assert dispatcher.captured(8).batch.batch_size == 8


def test_arithmetic_that_fails_is_that_tables_trouble_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(table(*rows((100.0, 130.0))), tmp_path / "a.tsv")
    tuned = Request._tuned

    def failing(self: Request, found: Any, *arguments: Any) -> Any:
        if "a.tsv" in found.table.head.source:
            raise OverflowError("made up")
        return tuned(self, found, *arguments)

    monkeypatch.setattr(Request, "_tuned", failing)

    assert "a.tsv" not in opened(path).source
    assert "a.tsv cannot be used: made up" in caplog.text


def test_an_arm_that_failed_everywhere_is_a_few_conditions(tmp_path: Path) -> None:
    words = [f"extend:{i % 1900}+{1 + i % 97}x{1 + (i * 7) % 89}" for i in range(3000)]
    places = {word: failed(word, "mha/fa3", "made up") for word in words}
    good = [ok(f"extend:{7 * i}+{2000 - 11 * i}x3", "mha/fa3") for i in range(150)]
    dispatcher = opened(
        written(table(*places.values(), *good, *rows((100.0,))[1:]), tmp_path / "a.tsv")
    )

    policy = dispatcher.policies["prefill"]
    assert all(len(boxes) <= 64 for boxes in policy.fitted.failures["mha/fa3"].boxes.values())
    assert dispatcher.plan(Batch.extend([512], [64])) is not None


def test_a_table_that_goes_away_does_not_stop_a_plan(tmp_path: Path) -> None:
    path = written(table(*rows((100.0, 1.0, 5000.0, 7.0, 90.0))), tmp_path / "a.tsv")
    dispatcher = opened(path)
    path.unlink()

    for batch in map(Batch.parse, BATCHES):
        plan = dispatcher.plan(batch)
        assert plan.prefill_path in ("mha", "mla")
        assert plan.reasons["prefill_path"].text


# --- hard limits


LIES = (
    replace(DEVICE, memory=10**17),
    replace(DEVICE, memory=0),
    replace(DEVICE, arch="sm100"),
    replace(DEVICE, shared_memory_optin=240_000),
    replace(DEVICE, sms=1),
)


@pytest.mark.parametrize("lie", LIES)
def test_of_a_known_gpu_the_code_knows_the_facts(lie: Device, tmp_path: Path) -> None:
    limits = {
        "deep_gemm_metadata_rows": 10**9,
        "deep_gemm_next_n": 4,
        "flashmla_decode_rows": 10**9,
    }
    lies = replace(table(*rows((100.0, 130.0))), device=lie, limits=limits)

    setting = opened(written(lies, tmp_path / "a.tsv")).setting

    assert setting.device == KNOWN[KEY.gpu]
    assert (metadata_rows(setting) or 0) <= 58112


def test_a_device_of_another_name_changes_no_facts_of_a_known_gpu(tmp_path: Path) -> None:
    device = replace(DEVICE, name="unheard of", arch="0x10")
    path = stored(tmp_path / "a.db", replace(table(*rows((100.0, 130.0))), device=device))

    dispatcher = opened(path)

    assert str(path) in dispatcher.source
    assert dispatcher.setting.device == KNOWN[KEY.gpu]


def test_next_n_stays_what_the_gpu_takes(tmp_path: Path) -> None:
    lies = replace(table(*rows((100.0, 130.0))), device=LIES[2], limits={"deep_gemm_next_n": 4})
    dispatcher = opened(written(lies, tmp_path / "a.tsv"))
    point = dispatcher.policies["indexer_layout"].point

    why = point.arm("native/deep_gemm").allowed(Batch.verify([4096], 4), dispatcher.setting)

    assert why is not None
    assert "next_n 1 or 2" in why


def test_a_smaller_memory_counts() -> None:
    assert device_of(replace(DEVICE, memory=2**30)).memory == 2**30


def test_of_an_unknown_gpu_no_more_than_any_has(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = Device("Some GPU", "sm90", 132, 10**9, 10**17, 0)

    found = device_of(claimed)
    assert (found.arch, found.shared_memory_optin, found.memory) == ("sm90", 232448, 180 * 10**9)

    monkeypatch.setattr(nvml, "facts_of", lambda name: ("sm89", 24 * 2**30))
    found = device_of(claimed)
    assert (found.arch, found.memory) == ("sm89", 24 * 2**30)


def test_a_probe_of_another_version_never_loosens_a_limit() -> None:
    setting = Setting.of(replace(table(), limits={"deep_gemm_metadata_rows": 50_000}))
    unknown = replace(setting, libraries={"deep-gemm": "9.9"})
    elsewhere = probed_elsewhere(setting.limits, {"deep-gemm": "2.0"}, {"deep-gemm": "9.9"})

    assert elsewhere == {"deep_gemm_metadata_rows"}
    assert metadata_rows(unknown) == 50_000
    assert metadata_rows(replace(unknown, limits_elsewhere=elsewhere)) is None
    # It still says where not to go.
    known = replace(setting, libraries={"sgl-deep-gemm": "0.1.4"}, limits_elsewhere=elsewhere)
    assert metadata_rows(known) == 50_000


@pytest.mark.parametrize("name", ["deep_gemm_metadata_rows", "flashmla_schedule_rows"])
def test_a_probe_alone_is_believed_up_to_what_no_build_passes(name: str) -> None:
    setting = replace(Setting.of(replace(table(), limits={name: 10**9})), libraries={})
    found = metadata_rows(setting) if name.startswith("deep") else schedule_rows(setting)

    assert found == 232448 // (4 if name.startswith("deep") else 8)


@given(st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.booleans())
def test_a_table_never_lifts_what_a_formula_says(
    formula: int | None, probed: int | None, elsewhere: bool
) -> None:
    limits = {} if probed is None else {"x": probed}
    names = frozenset(limits) if elsewhere else frozenset()
    setting = replace(Setting.of(table()), limits=limits, limits_elsewhere=names)

    found = bound(setting, "x", formula, 1000)

    if formula is not None:
        assert found is not None and found <= formula
    else:
        assert found is None or (found <= 1000 and not elsewhere)


# --- surfaces


def test_a_large_table_whose_models_choose_badly_is_not_compared_place_by_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = 0

    def counted(*arguments: Any) -> float:
        nonlocal measured
        measured += 1
        return dist(*arguments)

    monkeypatch.setattr("nsa_tune.backend.costmodel.surface.dist", counted)
    random = Random(1)
    places = [f"extend:{1 + i % 1800}+{1 + i % 97}x{1 + i % 31}" for i in range(2000)]
    lies = [
        ok(batch, arm, random.choice((10.0, 100.0, 1000.0)))
        for batch in dict.fromkeys(places)
        for arm in ARMS
    ]
    dispatcher = opened(written(table(*lies), tmp_path / "a.tsv"))

    assert dispatcher.policies["prefill"].estimates(Batch.extend([1000], [50]))

    assert 0 < measured < 600_000, "every place was compared with every other"
