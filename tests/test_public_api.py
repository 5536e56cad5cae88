"""The public names are stable: others script against them."""

from __future__ import annotations

import inspect

import pytest

import nsa_tune
from nsa_tune import _errors


def test_the_public_names_are_these() -> None:
    assert nsa_tune.__all__ == [
        "Batch",
        "BatchError",
        "DeviceMissing",
        "Dispatcher",
        "ExtraMissing",
        "HeadsError",
        "LibraryMissing",
        "MachineUnfit",
        "NoTunedData",
        "NsaTuneError",
        "Plan",
        "Reason",
        "StoreCorrupt",
        "StoreError",
        "StoreMissing",
        "StoreNewer",
        "StoreReadOnly",
        "UnknownName",
        "UsageError",
        "__version__",
    ]
    assert all(hasattr(nsa_tune, name) for name in nsa_tune.__all__)
    assert set(nsa_tune.__all__) <= set(dir(nsa_tune))


def test_a_name_that_is_not_public_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'nsa_tune' has no attribute 'Tuner'"):
        nsa_tune.Tuner  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_is_public() -> None:
    errors = {name for name, thing in vars(_errors).items() if isinstance(thing, type)}
    assert errors <= set(nsa_tune.__all__)


def test_the_version_is_the_packages() -> None:
    assert nsa_tune.__version__ == "0.1.0"


def test_a_plan_has_these_fields() -> None:
    assert list(nsa_tune.Plan.__dataclass_fields__) == [
        "batch",
        "prefill_path",
        "mha_kernel",
        "sparse_prefill",
        "indexer_layout",
        "decode",
        "indexer_metadata",
        "indexer_prefill",
        "indexer_topk",
        "topk_transform",
        "dequantize_prefix",
        "skip_topk",
        "_origin",
        "v4_prefill_c4",
        "v4_prefill_c128",
        "layout_conversion",
        "absorbed_prefill",
    ]
    assert list(nsa_tune.Reason.__dataclass_fields__) == [
        "verdict",
        "source",
        "estimates_us",
        "intervals_us",
        "guards",
        "text",
        "expected_regret",
        "to_win",
        "key",
        "rows",
        "consulted",
    ]


def test_the_dispatcher_is_opened_like_this() -> None:
    parameters = inspect.signature(nsa_tune.Dispatcher.open).parameters

    assert list(parameters) == [
        "db", "gpu", "model", "heads", "kv_dtype", "strict", "baseline", "demote_failed",
        "layers", "allow_lossy",
    ]  # fmt: skip
    assert list(inspect.signature(nsa_tune.Dispatcher.captured).parameters)[1:] == [
        "batch_size",
        "next_n",
        "mode",
        "contexts",
    ]
