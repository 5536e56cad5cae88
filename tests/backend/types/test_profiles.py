"""Model profiles: their shapes, and which local head counts they allow."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_tune import HeadsError, UnknownName, UsageError
from nsa_tune.backend.types.profiles import PROFILES, family_of, profile_of


def test_v32_has_the_shape_of_its_config() -> None:
    profile = profile_of("deepseek-v3.2")

    assert (profile.heads, profile.rank, profile.rope, profile.nope, profile.v) == (
        128,
        512,
        64,
        128,
        128,
    )
    assert (profile.index_heads, profile.index_dim, profile.index_topk) == (64, 128, 2048)
    assert (profile.latent, profile.page_size) == (576, 64)
    assert profile.softmax_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_found_by_their_names(name: str) -> None:
    assert profile_of(name).name == name


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown model 'gpt-2'; use one of: deepseek-v3\.2"):
        profile_of("gpt-2")


@pytest.mark.parametrize("heads", [1, 2, 16, 64, 128])
def test_heads_that_divide_are_taken(heads: int) -> None:
    assert profile_of("deepseek-v3.2").check_heads(heads) == heads


@pytest.mark.parametrize("heads", [3, 48, 256])
def test_heads_that_do_not_divide_are_refused_with_those_that_do(heads: int) -> None:
    with pytest.raises(HeadsError, match=f"{heads} local heads do not divide .* 64, 128"):
        profile_of("deepseek-v3.2").check_heads(heads)


@pytest.mark.parametrize("heads", [0, -8, True, 16.0, "16", None])
def test_what_is_no_count_of_heads_is_a_usage_error(heads: Any) -> None:
    with pytest.raises(UsageError, match="positive whole number"):
        profile_of("deepseek-v3.2").check_heads(heads)


def test_v4_heads_are_512_wide_of_which_448_are_quantized() -> None:
    for name, heads, topk in (("deepseek-v4", 128, 1024), ("deepseek-v4-flash", 64, 512)):
        profile = profile_of(name)
        assert (profile.heads, profile.index_topk, profile.window) == (heads, topk, 128)
        assert (profile.rank, profile.latent, profile.v) == (448, 512, 512)
        assert profile.softmax_scale == pytest.approx(512**-0.5)
        assert str(profile.layout("fp8")) == "v4_paged"


def test_a_model_names_the_layouts_of_its_family() -> None:
    assert str(profile_of("glm-5").layout("fp8")) == "fp8_packed"
    assert family_of("deepseek-v4") == "v4"
    assert family_of("deepseek-v3.2") == family_of(None) == family_of("unheard of") == "dsa"
    with pytest.raises(UnknownName, match="unknown KV dtype 'bf16'; use one of: fp8"):
        profile_of("deepseek-v4").layout("bf16")


@pytest.mark.parametrize(
    ("model", "layers", "alike"),
    [
        ("deepseek-v3.2", 61, 61),
        ("glm-5", 78, 78),
        # Those of one compression ratio share what is computed once a pass.
        ("deepseek-v4", 61, 30),
        ("deepseek-v4-flash", 43, 21),
    ],
)
def test_a_profile_knows_how_many_layers_share_a_pass(model: str, layers: int, alike: int) -> None:
    assert (profile_of(model).layers, profile_of(model).alike) == (layers, alike)
