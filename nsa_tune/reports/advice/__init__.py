"""Advice: values for the options that an engine already has, derived from a table."""
