"""Timing one batch: devices, timing protocols, checks against the reference."""
