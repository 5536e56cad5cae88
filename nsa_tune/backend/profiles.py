"""Model profiles: the shape of a model's sparse attention, as its config.json gives it."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune._errors import HeadsError, UnknownName

__all__ = ["PROFILES", "ModelProfile", "profile_of"]


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
    index_dim: int = 128
    index_topk: int = 2048
    """Tokens that a query attends to; up to this many, sparse equals dense."""
    page_size: int = 64

    def __post_init__(self) -> None:
        assert self.rank % 128 == 0, "the packed fp8 layout scales tiles of 128 values"
        assert self.index_topk % self.page_size == 0

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
                f"use one of: {', '.join(map(str, divisors))}"
            )
        return local_heads


PROFILES: dict[str, ModelProfile] = {
    profile.name: profile
    for profile in (
        # deepseek-ai/DeepSeek-V3.2 config.json
        ModelProfile("deepseek-v3.2", heads=128),
        # zai-org/GLM-5 config.json
        ModelProfile("glm-5", heads=64, nope=192, v=256, index_heads=32),
        # No model: small enough that a CPU measures a whole table in a minute.
        ModelProfile(
            "tiny", heads=4, rank=128, nope=32, rope=32, v=32,
            index_heads=4, index_dim=32, index_topk=128, page_size=16,
        ),
    )
}  # fmt: skip


def profile_of(name: str) -> ModelProfile:
    """The profile called `name`.

    Raises:
        UnknownName: when there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownName.of("model", name, list(PROFILES)) from None
