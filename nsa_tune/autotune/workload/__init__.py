"""Batches that engines run: request traces, a simulated scheduler, decision logs."""
