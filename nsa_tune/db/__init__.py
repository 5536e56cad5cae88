"""The tuner's side of the database: schema, migrations, store, and the exchange with text."""

from __future__ import annotations
