"""Schedules: which batch is measured next, and when a sweep has measured enough."""
