"""Advice for V4: SGLang's one switch between its two ways of sparse prefill.

The switch is one for all batches and all layers; only a batch of many new tokens goes the sparse
way whatever it says. A layer of each compression ratio counts the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.sglang.releases import MOST_PAGED
from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.advice.limits import Advice, Setting, Unadvised
from nsa_tune.reports.advice.weighing import Cell, Change, weigh

__all__ = ["SPARSE_PREFILL", "advise_v4", "measured_by"]

SPARSE_PREFILL = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
_SPARSE, _PAGED = "sparse_fwd", "with_kvcache"
_NOTE = (
    "Off, it still goes the sparse way above {} new tokens. One layer of each compression ratio "
    "counts, those of the window alone none. The plug-in decides batch by batch instead"
)


def measured_by(dispatcher: Dispatcher) -> list[Batch]:
    """The batches that every ratio was measured on.

    Raises:
        NoTunedData: when there is none.
    """
    policies = _policies(dispatcher)
    every = [set(policy.measured) for policy in policies]
    common = [one for one in policies[0].measured if all(one in some for some in every)]
    if not common:
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    return common


def advise_v4(
    dispatcher: Dispatcher, weighted: Iterable[tuple[Batch, float]]
) -> Advice | Unadvised:
    """Whether to switch sparse prefill off, by batches with their weights."""
    policies = _policies(dispatcher)
    changes = []
    for batch, weight in weighted:
        sparse, paged = (_together(policies, arm, batch) for arm in (_SPARSE, _PAGED))
        if sparse is None or paged is None:
            continue
        after = sparse if batch.q_tokens > MOST_PAGED else paged
        cell = Cell(batch, weight, None, {_SPARSE: sparse, _PAGED: paged})
        changes.append(Change(cell, sparse, after))
    note = _NOTE.format(MOST_PAGED)
    found = weigh([Setting(SPARSE_PREFILL, "0", "1")], changes, note)
    return found or Unadvised(SPARSE_PREFILL, "off it gains nothing over the default, 1")


def _policies(dispatcher: Dispatcher) -> list[Policy]:
    names = [f"v4_prefill_c{ratio}" for ratio in dispatcher.setting.profile.ratios]
    found = [dispatcher.policies[name] for name in names if name in dispatcher.policies]
    if len(found) < len(names) or not all(policy.measured for policy in found):
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    return found


def _together(policies: Sequence[Policy], arm: str, batch: Batch) -> Estimate | None:
    """The time of `arm` in a layer of each ratio; None where it may not run or is not known."""
    parts = []
    for policy in policies:
        allowed, estimates = policy.survey(batch).latencies, policy.estimates(batch)
        if allowed.get(arm) is None or arm not in estimates:
            return None
        parts.append(estimates[arm])
    return Estimate.total(parts)
