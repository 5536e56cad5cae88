"""A worker that pushes a growing table: `python -m tests.fleet.pushing URL HEADS PUSHES`.

It measures nothing; each push has more rows than the one before, as those of a worker have.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from nsa_tune.remote.client import Client
from tests.fleet.service.made_up_tables import H200_KEY, grown, text_of

__all__: list[str] = []


def main() -> None:
    """Push; print how many rows the service said that it has added."""
    url, heads, pushes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client = Client(url, os.environ["NSA_TUNE_TOKEN"], patience_s=120)
    key = replace(H200_KEY, heads=heads)
    added = 0
    for push in range(1, pushes + 1):
        added += client.post("/v1/tables", text_of(grown(push, key, minute=push)))["added"]
    sys.stdout.write(json.dumps({"added": added}))


if __name__ == "__main__":
    main()
