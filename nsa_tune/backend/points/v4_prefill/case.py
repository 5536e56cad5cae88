"""Input tensors of V4's prefill: queries, a pool of window tokens, a pool of compressed ones, and
what each query selects of both."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch

from nsa_tune.backend.kernels import v4_paged
from nsa_tune.backend.points.checked_rows import checked_rows, worst_error
from nsa_tune.backend.points.paging import Paging, query_rows, scatter, spread_selection
from nsa_tune.backend.points.v4_prefill.features import extra_width
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import ModelProfile

_QUANTIZED_AT_ONCE = 2**17
_INDEX_COLUMNS = 64
"""flash_mla_with_kvcache takes rows of a multiple of this many indices."""


class TokenPool:
    """A paged pool of the V4 layout, with the values that it stands for."""

    def __init__(
        self, profile: ModelProfile, slots: int, page_size: int, seed: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.rank, self.rope = profile.rank, profile.rope
        pages = slots // page_size
        self.bytes = v4_paged.empty_pool(pages, page_size, self.rank, self.rope, device)
        """[pages, bytes a page] uint8."""
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (pages * page_size, profile.latent)
        latents = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        every = torch.arange(pages * page_size, dtype=torch.int32, device=device)
        # Not all at once: places take eight bytes for each byte of the pool.
        for some in every.split(_QUANTIZED_AT_ONCE):
            v4_paged.quantize(latents[some], some, self.bytes, page_size, self.rank)

    @property
    def rows(self) -> torch.Tensor:
        """As FlashMLA takes it: [pages, page size, 1, bytes a token] uint8."""
        return v4_paged.rows_of(self.bytes, self.page_size, self.rank, self.rope)

    def read(self, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Values [tokens, rank + rope] bf16 of the tokens in `slots`, into `out` if given."""
        where = (self.bytes, slots, self.page_size, self.rank, self.rope)
        if self.bytes.device.type != "cpu":
            return v4_paged.dequantize(*where, out)
        values = v4_paged.dequantize_reference(*where)
        return values if out is None else out.copy_(values)


_pool = lru_cache(maxsize=4)(TokenPool)


class V4PrefillCase:
    """One extend batch in a layer of one compression ratio, ready for every arm of its point."""

    tolerance = 0.02
    """bf16 operands and probabilities; a wrong key leaves far more."""

    def __init__(self, ratio: int, batch: Batch, setting: Setting, device: torch.device) -> None:
        lens = batch.given_lens
        self.batch, self.setting, self.ratio, self.device = batch, setting, ratio, device
        self.profile, self.heads = setting.profile, setting.heads
        profile = self.profile
        totals = [prefix + new for prefix, new in lens]
        windows = [
            min(t, new + profile.window - 1) for t, (_, new) in zip(totals, lens, strict=True)
        ]
        # A compressed token stands for `ratio` tokens, all of which came before its reader.
        extras = [total // ratio for total in totals]
        self.window_pool, self._window = self._placed(windows, profile.page_size, seed=1)
        page = max(profile.page_size // ratio, 1)
        self.extra_pool, self._extra = self._placed(extras, page, seed=2)
        self.window_slots, self.extra_slots = self._window.slots, self._extra.slots
        """[window tokens] and [compressed tokens] int32: what [window; extra] is gathered from."""
        self._locate_queries(windows, totals)
        generator = torch.Generator(device=device).manual_seed(3)
        shape = (batch.q_tokens, self.heads, profile.latent)
        self.q = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        """[q tokens, heads, rank + rope] bf16."""
        self.sink = torch.randn(self.heads, generator=generator, device=device)
        """[heads] fp32: a logit that takes part in the softmax and has no value."""

    def _placed(self, lens: list[int], page_size: int, seed: int) -> tuple[TokenPool, Paging]:
        needed = sum(-(-length // page_size) * page_size for length in lens)
        # At least a few times what the L2 holds, so that scattered pages are really scattered.
        smallest = 2**11 if self.device.type == "cpu" else 2**18
        slots = max(smallest, 1 << max(needed - 1, 0).bit_length())
        pool = _pool(self.profile, slots, page_size, seed, self.device)
        return pool, scatter(lens, page_size, slots, self.device)

    def _locate_queries(self, windows: list[int], totals: list[int]) -> None:
        device = self.device
        new = torch.tensor([new for _, new in self.batch.given_lens], device=device)
        total, window = torch.tensor(totals, device=device), torch.tensor(windows, device=device)
        self._starts_q = torch.cat((new.new_zeros(1), new.cumsum(0)))
        sequence, seen = query_rows(self.batch.given_lens, device)
        self._positions = seen.long() - 1
        self._first_window = (self._window.starts[:-1] - (total - window))[sequence]
        self._first_extra = self._extra.starts[:-1][sequence]
        self.window_lengths = (self._positions + 1).clamp_max(self.profile.window).int()
        """[q tokens] int32: window tokens that each query attends to."""
        self._most_extra = extra_width(self.profile, self.ratio, self.batch.max_kv)
        self.extra_lengths = (seen // self.ratio).clamp_max(self._most_extra)
        """[q tokens] int32: compressed tokens that each query attends to."""

    @cached_property
    def window_indices(self) -> torch.Tensor:
        """[q tokens, window] int32 into the gathered window tokens, -1 behind the length."""
        column = torch.arange(self.profile.window, device=self.device)
        length = self.window_lengths[:, None]
        first = self._first_window + self._positions + 1 - self.window_lengths
        return torch.where(column < length, first[:, None] + column, -1).int()

    @cached_property
    def extra_indices(self) -> torch.Tensor:
        """[q tokens, a multiple of 64] int32 into the gathered compressed tokens, -1 behind the
        length. Where not all are selected, they are spread over the context and scrambled."""
        most = self._most_extra
        width = -(-most // _INDEX_COLUMNS) * _INDEX_COLUMNS
        shape = self.batch.q_tokens, width
        out = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        seen = (self._positions + 1) // self.ratio
        return spread_selection(seen, self._first_extra, out, most, seed=4)

    @cached_property
    def _checked(self) -> torch.Tensor:
        """Rows whose output is compared."""
        return checked_rows(self._starts_q, seed=5)

    @cached_property
    def _reference(self) -> torch.Tensor:
        """[checked rows, heads, rank + rope] fp32: softmax attention with a sink."""
        out = []
        for row in self._checked.tolist():
            window = self.window_indices[row, : int(self.window_lengths[row])].long()
            extra = self.extra_indices[row, : int(self.extra_lengths[row])].long()
            parts = (
                self.window_pool.read(self.window_slots[window]),
                self.extra_pool.read(self.extra_slots[extra]),
            )
            keys = torch.cat(parts).float()
            scores = self.q[row].float() @ keys.T * self.profile.softmax_scale
            every = torch.cat((scores, self.sink[:, None]), dim=1).softmax(-1)
            out.append(every[:, :-1] @ keys)
        return torch.stack(out)

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a checked row; inf when any output is not finite."""
        return worst_error(output, self._checked, self._reference)
