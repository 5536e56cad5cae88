"""`nsa-tune` and `python -m nsa_tune`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, which no plug-in needs, name them: exit 1."""
    try:
        from nsa_tune import cli
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.exit("nsa-tune: commands need two more packages: pip install rich typer")
    cli.main()


if __name__ == "__main__":
    main()
