"""The commands that price an engine's traffic: `replay` and `advise`."""
