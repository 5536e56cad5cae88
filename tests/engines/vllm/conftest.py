"""vLLM's sources as fixtures, one test a release."""

from __future__ import annotations

import pytest

from nsa_tune.engines.vllm import EDGE
from tests.engines.vllm.wheels import VERSIONS, wheel_of
from tests.engines.wheels import Unreachable, Wheel


@pytest.fixture(scope="session", params=VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    """The sources of each release in turn; skipped where the index cannot be reached."""
    return _fetched(request.param)


@pytest.fixture(scope="session")
def newest() -> Wheel:
    """The sources of the last release."""
    return _fetched(VERSIONS[-1])


def _fetched(version: str) -> Wheel:
    try:
        return wheel_of(version)
    except Unreachable as reason:
        pytest.skip(f"the sources of vLLM {version} cannot be had: {reason}")


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Forget what was said before: each text is logged once a process."""
    EDGE.forget()
