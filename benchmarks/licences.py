"""Prints the licence of each package of deploy/serve.lock that is installed here, one a line.

python -m benchmarks.licences > deploy/licences.txt
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

LOCK = Path(__file__).parents[1] / "deploy" / "serve.lock"


def locked() -> dict[str, str]:
    """The version of each package in the lock."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))


def licence_of(package: Distribution) -> str:
    """As an expression, or else as its classifiers or its first line say."""
    fields = {
        name: package.metadata.get_all(name) or []
        for name in ("License-Expression", "Classifier", "License")
    }
    classifiers = [text for text in fields["Classifier"] if text.startswith("License ::")]
    words = " and ".join(text.rpartition(" :: ")[2] for text in classifiers)
    texts = [*fields["License-Expression"], words, *fields["License"]]
    return next((text.splitlines()[0] for text in texts if text), "not said")


def main() -> None:
    """Print them."""
    for name, version in locked().items():
        try:
            licence = licence_of(distribution(name))
        except PackageNotFoundError:
            licence = "not installed here"
        print(f"{name} {version}: {licence}")


if __name__ == "__main__":
    main()
