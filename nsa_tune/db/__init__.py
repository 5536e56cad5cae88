"""All that reads or writes rows: schema, migrations, store, the fast reader, text tables."""

from __future__ import annotations
