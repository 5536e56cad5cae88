"""Many hosts: one service keeps the tables, workers measure them, and every host pulls them."""

from __future__ import annotations
