"""Model profiles: the shape of a model's attention, as its config.json gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from nsa_tune._errors import HeadsError, UnknownName
from nsa_tune.backend.types.layouts import SCALE_TILE, V4_SCALE_TILE, KVLayout, layout_of

ALL_TOKENS = 2**30
"""The `index_topk` of a model without an indexer, whose queries attend to every token."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The attention shape of one model. Dimensions are in values, not bytes."""

    name: str
    heads: int
    """Query heads of the whole model; local heads are these over the tensor-parallel size."""
    rank: int = 512
    """kv_lora_rank: the width of the compressed latent."""
    nope: int = 128
    """qk_nope_head_dim."""
    rope: int = 64
    """qk_rope_head_dim."""
    v: int = 128
    """v_head_dim."""
    index_heads: int = 64
    """Heads of the indexer; 0 in a model that has none."""
    index_dim: int = 128
    index_topk: int = 2048
    """Tokens that a query attends to; up to this many, sparse equals dense. In V4 compressed
    tokens, beside those of the window."""
    page_size: int = 64
    layers: int = 61
    """Layers of the whole model that have such attention."""
    family: str = "dsa"
    """"dsa" (one pool of latents), "mla" (the same without an indexer) or "v4" (a window of tokens,
    and compressed ones behind it)."""
    window: int = 0
    """Tokens before and with a query that it attends to uncompressed; 0 outside of V4."""
    ratios: tuple[int, ...] = ()
    """Compression ratios of V4's layers, those of the window alone left out."""

    def __post_init__(self) -> None:
        tile = V4_SCALE_TILE if self.family == "v4" else SCALE_TILE
        assert self.rank % tile == 0, "fp8 layouts scale whole tiles of values"
        assert self.index_topk % self.page_size == 0

    def layout(self, kv_dtype: str) -> KVLayout:
        """The layout of this model's pools for `kv_dtype`.

        Raises:
            UnknownName: when it has none of that name.
        """
        return layout_of(kv_dtype, self.family)

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer selects the tokens that a query attends to."""
        return self.index_heads > 0

    @property
    def unit(self) -> int:
        """Tokens in whose multiples sweeps take their lengths: index_topk, or else 32 pages."""
        return self.index_topk if self.has_indexer else 32 * self.page_size

    @property
    def alike(self) -> int:
        """Layers that share what is computed once a pass: those of one compression ratio."""
        return max(self.layers // max(len(self.ratios), 1), 1)

    @property
    def latent(self) -> int:
        """Width of a latent with its rope part: what one token leaves in the KV pool."""
        return self.rank + self.rope

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(nope + rope), in the expanded and in the absorbed form alike."""
        return float((self.nope + self.rope) ** -0.5)

    def check_heads(self, local_heads: int) -> int:
        """`local_heads` if they divide the model's heads.

        Raises:
            HeadsError: when they do not.
        """
        if isinstance(local_heads, bool) or not isinstance(local_heads, int) or local_heads < 1:
            raise HeadsError(f"local heads must be a positive whole number, got {local_heads!r}")
        if self.heads % local_heads:
            divisors = [h for h in range(1, self.heads + 1) if self.heads % h == 0]
            raise HeadsError(
                f"{local_heads} local heads do not divide the {self.heads} heads of {self.name}; "
                f"use one of {', '.join(map(str, divisors))}, or name another model"
            )
        return local_heads


_V3 = ModelProfile(
    "deepseek-v3", heads=128, index_heads=0, index_dim=0, index_topk=ALL_TOKENS, family="mla"
)


PROFILES: dict[str, ModelProfile] = {
    profile.name: profile
    for profile in (
        # deepseek-ai/DeepSeek-V3.2 config.json
        ModelProfile("deepseek-v3.2", heads=128),
        # zai-org/GLM-5 config.json
        ModelProfile("glm-5", heads=64, nope=192, v=256, index_heads=32, layers=78),
        # deepseek-ai/DeepSeek-V3, -V3.1 and -R1, and moonshotai/Kimi-K2 config.json
        _V3,
        replace(_V3, name="kimi-k2", heads=64),
        # deepseek-ai/DeepSeek-V4-Pro and -Flash config.json: a head of 512, of which 448 are
        # quantized and 64 rotated, is key and value alike. Pages as SGLang's: 256 tokens.
        ModelProfile(
            "deepseek-v4", heads=128, rank=448, nope=448, v=512, index_topk=1024, page_size=256,
            family="v4", window=128, ratios=(4, 128),
        ),
        ModelProfile(
            "deepseek-v4-flash", heads=64, rank=448, nope=448, v=512, index_topk=512,
            page_size=256, family="v4", window=128, ratios=(4, 128), layers=43,
        ),
        # No models: small enough that a CPU measures a whole table in a minute.
        ModelProfile(
            "tiny-v4", heads=4, rank=64, nope=64, rope=32, v=96, index_heads=4, index_dim=32,
            index_topk=256, page_size=256, family="v4", window=64, ratios=(4, 128),
        ),
        ModelProfile(
            "tiny", heads=4, rank=128, nope=32, rope=32, v=32,
            index_heads=4, index_dim=32, index_topk=128, page_size=16,
        ),
        replace(_V3, name="tiny-mla", heads=4, rank=128, nope=32, rope=32, v=32, page_size=16),
    )
}  # fmt: skip

REUSING = {"glm-5.2": ("glm-5", 21)}
"""Models of another's shapes, whose tables hold for them, and of how many layers the indexer runs:
the others reuse a selection (config.json: index_topk_freq 4, index_skip_topk_offset 3)."""


class Checkpoint(NamedTuple):
    """A model as it is served."""

    path: str
    weights_gb: float
    """10^9 bytes of the fp8 checkpoint, without drafting layers."""
    attention_gb: float
    """Of these, what every rank of data-parallel attention holds whole."""


CHECKPOINTS = {
    # Sizes of the safetensors files; attention from the shapes in config.json.
    "deepseek-v3.2": Checkpoint("deepseek-ai/DeepSeek-V3.2", 676, 12.2),
    "glm-5": Checkpoint("zai-org/GLM-5-FP8", 750, 13.5),
    "glm-5.2": Checkpoint("zai-org/GLM-5.2-FP8", 750, 13.5),
}


def profile_of(name: str) -> ModelProfile:
    """The profile called `name`.

    Raises:
        UnknownName: when there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownName.of("model", name, list(PROFILES)) from None


def family_of(name: str | None) -> str:
    """The family of the model called `name`; "dsa" for no name, or one that is not known."""
    profile = PROFILES.get(name or "")
    return "dsa" if profile is None else profile.family
