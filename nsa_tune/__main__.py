"""`python -m nsa_tune`."""

from __future__ import annotations

from nsa_tune.cli import main

if __name__ == "__main__":
    main()
