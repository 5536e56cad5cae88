"""Decide what to measure, measure it, keep it. Needs torch."""
