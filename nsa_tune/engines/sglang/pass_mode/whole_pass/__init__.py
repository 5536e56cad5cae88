"""Prefill CUDA graphs of the plug-in itself, without breaks: a whole pass each."""
