"""The kernels of nsa-tune's that may take the place of SGLang's, each a `KernelSwap`."""

from __future__ import annotations

from nsa_tune.engines.sglang.kernels.copies import PADDING, READ_BACK
from nsa_tune.engines.sglang.kernels.decode import DECODE
from nsa_tune.engines.sglang.kernels.topk import PAGED, RAGGED

SWAPS = (PAGED, RAGGED, READ_BACK, PADDING, DECODE)
