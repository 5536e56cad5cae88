"""Plug-ins for inference engines, one package an engine."""
