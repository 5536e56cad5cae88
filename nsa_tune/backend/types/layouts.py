"""KV cache layouts: how tokens lie in a paged pool byte by byte, who reads which, and what it
costs to turn one into another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nsa_tune._errors import UnknownName

SCALE_TILE = 128
"""Values that share one fp32 scale in the packed fp8 layout."""
V4_SCALE_TILE = 64
"""Values that share one ue8m0 scale in the V4 layout."""
_V4_SCALE_BYTES = 8
"""A token's scales are padded to a multiple of this, so that they load as one word."""


@dataclass(frozen=True, slots=True)
class Span:
    """One field of a token, where it lies in the token's bytes."""

    name: str
    dtype: str
    """"bf16", "e4m3", "fp32" or "ue8m0"."""
    offset: int
    count: int

    @property
    def size(self) -> int:
        """Bytes that the field takes."""
        return self.count * _WIDTHS[self.dtype]


_WIDTHS = {"bf16": 2, "e4m3": 1, "fp32": 4, "ue8m0": 1}


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

    FP8_RAW = "fp8_raw"
    """TRT-LLM's layout: `rank + rope` e4m3 values and no scale: 576 bytes for V3.2."""

    V4_PAGED = "v4_paged"
    """DeepSeek V4's layout, a page as a structure of arrays: first every token's row of `rank`
    e4m3 and `rope` bf16 values (448 + 128 = 576 bytes), then every token's ue8m0 scales, one for
    64 values and padded to 8 bytes: 584 bytes a token, the page padded to a multiple of 576.
    value = e4m3 * 2 ** (scale - 127)."""

    def spans(self, rank: int, rope: int) -> tuple[Span, ...]:
        """The fields of one token, in order.

        In `V4_PAGED` the scales' offset counts from the token's own scales, behind all rows.
        """
        match self:
            case KVLayout.BF16:
                return (Span("latent", "bf16", 0, rank), Span("rope", "bf16", 2 * rank, rope))
            case KVLayout.FP8_RAW:
                return (Span("latent", "e4m3", 0, rank), Span("rope", "e4m3", rank, rope))
            case KVLayout.FP8_PACKED:
                scales = rank // SCALE_TILE
                return (
                    Span("latent", "e4m3", 0, rank),
                    Span("scales", "fp32", rank, scales),
                    Span("rope", "bf16", rank + 4 * scales, rope),
                )
            case KVLayout.V4_PAGED:
                padded = _up(rank // V4_SCALE_TILE, _V4_SCALE_BYTES)
                return (
                    Span("latent", "e4m3", 0, rank),
                    Span("rope", "bf16", rank, rope),
                    Span("scales", "ue8m0", 0, padded),
                )

    def token_bytes(self, rank: int, rope: int) -> int:
        """Bytes that one token takes in the pool, without the padding of pages."""
        return sum(span.size for span in self.spans(rank, rope))

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


# --- what can be turned into what


class Role(StrEnum):
    """What an implementation is used for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A kernel that turns tokens of one layout into another."""

    source: KVLayout
    target: KVLayout
    kernel: str
    """Module and function below `nsa_tune.backend.kernels`."""
    readers: frozenset[str]
    """Implementations that take its output; none: it only fills pools."""
    roles: frozenset[Role]
    """In which of their roles they may pay for it in every layer."""
    gathers: bool
    """True: the tokens of the batch into a compact copy. False: in place, slot by slot."""

    def moved_bytes(self, tokens: int, rank: int, rope: int) -> int:
        """Bytes read and written for `tokens` tokens, their int32 slots among them."""
        each = self.source.token_bytes(rank, rope) + self.target.token_bytes(rank, rope)
        return tokens * (each + 4)


_BOTH = frozenset(Role)
_PREFILL = frozenset({Role.PREFILL})
_GATHERED = frozenset(
    {
        "flashmla_sparse", "torch_sparse", "triton_sparse_mla",
        "triton_sparse_mla_union2", "triton_sparse_mla_union4",
    }
)  # fmt: skip

CONVERSIONS: tuple[Conversion, ...] = (
    Conversion(
        KVLayout.FP8_PACKED, KVLayout.BF16, "packed_fp8.dequantize", _GATHERED, _BOTH, True
    ),
    Conversion(
        KVLayout.V4_PAGED, KVLayout.BF16, "v4_paged.dequantize", frozenset({"sparse_fwd"}), _BOTH,
        True,
    ),
    # The values are rounded again: for kernels that compute in fp8.
    Conversion(
        KVLayout.FP8_PACKED, KVLayout.FP8_RAW, "packed_fp8.narrow",
        frozenset({"flashmla_sparse_q8", "torch_sparse_q8"}), _PREFILL, True,
    ),
    # Once a layer and chunk. A decode step would pay for its whole context to read a part of it.
    Conversion(
        KVLayout.FP8_RAW, KVLayout.FP8_PACKED, "packed_fp8.requantize_raw",
        frozenset({"flashmla_kv"}), _PREFILL, False,
    ),
    Conversion(
        KVLayout.BF16, KVLayout.FP8_PACKED, "packed_fp8.quantize", frozenset(), frozenset(), False
    ),
    Conversion(
        KVLayout.BF16, KVLayout.V4_PAGED, "v4_paged.quantize", frozenset(), frozenset(), False
    ),
)  # fmt: skip
"""Every conversion that there is a kernel for."""

# --- what engines can take

NO_PLUGINS = frozenset({f"mla/triton_sparse_mla{union}" for union in ("", "_union2", "_union4")})
"""Arms that no engine's plug-in takes."""
NOT_SGLANGS = NO_PLUGINS | {"mla/flashmla_kv_mixed", "mha/fa3_merged"}
"""Arms that SGLang's plug-in does not take: the others work as vLLM does."""
