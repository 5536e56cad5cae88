"""Flags that an engine already has and that a table speaks for."""
