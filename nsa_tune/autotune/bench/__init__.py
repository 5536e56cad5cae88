"""Measuring on one device: timing protocols, samples and their intervals, failures, ceilings."""
