"""Batches, model profiles, KV layouts, measurements, and what a decision point is."""
