"""Batches of a real workload, from request traces or from an engine's decision log."""
