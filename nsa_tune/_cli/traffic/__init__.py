"""The commands that price an engine's traffic by tables: `replay` and `advise`."""
