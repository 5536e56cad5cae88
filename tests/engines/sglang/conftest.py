"""SGLang's wheels as fixtures, one test a release."""

from __future__ import annotations

import pytest

from nsa_tune.engines.sglang import EDGE
from tests.engines.sglang.wheels import VERSIONS, Wheel, wheel_of
from tests.engines.wheels import Unreachable


@pytest.fixture(scope="session", params=VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    """The wheel of each release in turn; skipped where the index cannot be reached."""
    return _fetched(request.param)


@pytest.fixture(scope="session")
def oldest() -> Wheel:
    """The wheel of the first release."""
    return _fetched(VERSIONS[0])


@pytest.fixture(scope="session")
def newest() -> Wheel:
    """The wheel of the last release."""
    return _fetched(VERSIONS[-1])


def _fetched(version: str) -> Wheel:
    try:
        return wheel_of(version)
    except Unreachable as reason:
        pytest.skip(f"the wheel of SGLang {version} cannot be had: {reason}")


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Forget what was said before: each text is logged once a process."""
    EDGE.forget()
