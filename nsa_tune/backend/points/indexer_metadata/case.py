"""Input tensors of the indexer's schedule: the contexts of its rows."""

from __future__ import annotations

import torch

from nsa_tune.backend import libraries as providers
from nsa_tune.backend.kernels.mqa_schedule import Split, mqa_schedule_reference
from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.points.paging import query_rows
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_SMS_OF_A_CPU = 16


class MetadataCase:
    """The rows of one batch, each a query token of its own."""

    tolerance = 0.0
    """A schedule is whole numbers that a kernel indexes by: any other is wrong."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        self.batch, self.profile, self.device = batch, setting.profile, device
        _, seen = query_rows(batch.given_lens, device)
        self.context_lens = seen[:, None].contiguous()
        """[q tokens, 1] int32: keys that each query sees."""
        self.sms, self.split = setting.device.sms or _SMS_OF_A_CPU, Split.LAST_MORE
        """How the schedule is dealt: as the build of DeepGEMM that is here wants it."""
        if device.type == "cuda" and providers.answering("deep_gemm") is not None:
            self.sms = deep_gemm.sms()
            self.split = deep_gemm.schedule_split(setting.device.arch)

    def error_of(self, output: torch.Tensor) -> float:
        """0 for exactly the schedule, inf for any other."""
        reference = mqa_schedule_reference(self.context_lens, self.sms, self.split)
        return 0.0 if torch.equal(output, reference) else float("inf")
