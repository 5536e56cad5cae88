"""KV cache layouts: how tokens lie in a paged pool byte by byte."""

from __future__ import annotations

from enum import StrEnum

from nsa_tune._errors import UnknownName

SCALE_TILE = 128
"""Values that share one fp32 scale in the packed fp8 layout."""
V4_SCALE_TILE = 64
"""Values that share one ue8m0 scale in the V4 layout."""
_V4_SCALE_BYTES = 8
"""A token's scales are padded to a multiple of this, so that they load as one word."""


class KVLayout(StrEnum):
    """The layout of a paged MLA pool. Members of one pool never mix.

    `rank` is the width of the part that fp8 layouts quantize (512 in V3.2, 448 in V4), `rope` that
    of the rotated part behind it (64).
    """

    BF16 = "bf16"
    """`rank + rope` bf16 values a token: 576 values, 1152 bytes for V3.2."""

    FP8_PACKED = "fp8_packed"
    """FlashMLA's V3.2 layout: `rank` e4m3 values, one fp32 scale for each 128 of them, then
    `rope` bf16 values: 512 + 16 + 128 = 656 bytes a token. value = e4m3 * scale."""

    V4_PAGED = "v4_paged"
    """DeepSeek V4's layout, a page as a structure of arrays: first every token's row of `rank`
    e4m3 and `rope` bf16 values (448 + 128 = 576 bytes), then every token's ue8m0 scales, one for
    64 values and padded to 8 bytes: 584 bytes a token, the page padded to a multiple of 576.
    value = e4m3 * 2 ** (scale - 127)."""

    def token_bytes(self, rank: int, rope: int) -> int:
        """Bytes that one token takes in the pool, without the padding of pages."""
        match self:
            case KVLayout.BF16:
                return 2 * (rank + rope)
            case KVLayout.FP8_PACKED:
                return rank + 4 * (rank // SCALE_TILE) + 2 * rope
            case KVLayout.V4_PAGED:
                return rank + 2 * rope + _up(rank // V4_SCALE_TILE, _V4_SCALE_BYTES)

    def page_bytes(self, rank: int, rope: int, page_size: int) -> int:
        """Bytes from one page of `page_size` tokens to the next."""
        tokens = page_size * self.token_bytes(rank, rope)
        return _up(tokens, rank + 2 * rope) if self is KVLayout.V4_PAGED else tokens


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_BY_KV_DTYPE: dict[str, dict[str, KVLayout]] = {
    "dsa": {"bf16": KVLayout.BF16, "fp8": KVLayout.FP8_PACKED},
    "mla": {"bf16": KVLayout.BF16},
    "v4": {"fp8": KVLayout.V4_PAGED},
}


def layout_of(kv_dtype: str, family: str = "dsa") -> KVLayout:
    """The layout that the kernels of a model family read for `kv_dtype`: ``"bf16"`` or ``"fp8"``.

    Raises:
        UnknownName: for any other name; V4's pools are fp8 only, those of dense MLA bf16 only.
    """
    known = _BY_KV_DTYPE[family]
    try:
        return known[kv_dtype]
    except KeyError:
        raise UnknownName.of("KV dtype", kv_dtype, list(known)) from None


# --- what engines can take

SGLANGS_TRITON = frozenset({"mla/triton_sparse_mla", "mla/triton_sparse_mla_union4"})
"""Arms that only SGLang has, since 0.5.22."""
NOT_SGLANGS = frozenset({"mla/flashmla_kv_mixed", "mha/fa3_merged"})
"""Arms that SGLang's plug-in does not take: they work as vLLM does."""
