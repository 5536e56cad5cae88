"""Input tensors of the indexer's schedule: the contexts of its rows."""

from __future__ import annotations

import torch

from nsa_tune._errors import BatchError
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.kernels.mqa_schedule import Split, mqa_schedule_reference
from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_SMS_OF_A_CPU = 16


class MetadataCase:
    """The rows of one batch, each a query token of its own."""

    tolerance = 0.0
    """A schedule is whole numbers that a kernel indexes by: any other is wrong."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        assert batch.lens is not None
        self.batch, self.profile, self.device = batch, setting.profile, device
        prefix = torch.tensor([p for p, _ in batch.lens])
        new = torch.tensor([e for _, e in batch.lens])
        sequence = torch.repeat_interleave(torch.arange(len(new)), new)
        first = (new.cumsum(0) - new)[sequence]
        seen = prefix[sequence] + torch.arange(batch.q_tokens) - first + 1
        self.context_lens = seen.int()[:, None].contiguous().to(device)
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


def metadata_case(batch: Batch, setting: Setting, device: torch.device) -> MetadataCase:
    """The inputs of `batch`.

    Raises:
        BatchError: when only the batch's sums are known.
    """
    if batch.lens is None:
        raise BatchError("a batch of sums only cannot be measured; give the lengths")
    return MetadataCase(batch, setting, device)
