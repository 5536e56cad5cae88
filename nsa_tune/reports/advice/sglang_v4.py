"""Advice for DeepSeek V4: SGLang's switch between its two sparse prefill kernels.

The switch holds for all batches and layers, except that a batch of many new tokens always takes
sparse_fwd. Each compression ratio counts with one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.releases import MOST_PAGED
from nsa_tune.reports.advice.advice import Advice, EngineOption, Unadvised
from nsa_tune.reports.advice.gains import BatchTimes, Change, advice_on

SPARSE_PREFILL = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
_SPARSE, _PAGED = "sparse_fwd", "with_kvcache"
_NOTE = (
    "Even if off, batches of more than {} new tokens take the sparse kernel. Counts "
    "one layer of each compression ratio, no sliding-window layer. The plug-in decides by batch"
)


def measured_by(dispatcher: Dispatcher) -> list[Batch]:
    """The batches that were measured for every compression ratio.

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
    """Whether to switch sparse prefill off, for (batch, weight) pairs."""
    policies = _policies(dispatcher)
    changes = []
    for batch, weight in weighted:
        sparse, paged = (_together(policies, arm, batch) for arm in (_SPARSE, _PAGED))
        if sparse is None or paged is None:
            continue
        after = sparse if batch.q_tokens > MOST_PAGED else paged
        times = BatchTimes(batch, weight, None, {_SPARSE: sparse, _PAGED: paged})
        changes.append(Change(times, sparse, after))
    note = _NOTE.format(MOST_PAGED)
    found = advice_on([EngineOption(SPARSE_PREFILL, "0", "1")], changes, note)
    return found or Unadvised(SPARSE_PREFILL, "switching it off gains nothing")


def _policies(dispatcher: Dispatcher) -> list[Policy]:
    names = [f"v4_prefill_c{ratio}" for ratio in dispatcher.setting.profile.ratios]
    found = [dispatcher.policies[name] for name in names if name in dispatcher.policies]
    if len(found) < len(names) or not all(policy.measured for policy in found):
        raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
    return found


def _together(policies: Sequence[Policy], arm: str, batch: Batch) -> Estimate | None:
    """Total time of `arm` over one layer of each ratio; None where it has none or is forbidden."""
    parts = []
    for policy in policies:
        allowed, estimates = policy.survey(batch).latencies, policy.estimates(batch)
        if allowed.get(arm) is None or arm not in estimates:
            return None
        parts.append(estimates[arm])
    return Estimate.total(parts)
