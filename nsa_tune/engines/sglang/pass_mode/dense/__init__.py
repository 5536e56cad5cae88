"""Prefill CUDA graphs of the plug-in itself, without breaks, in which attention is dense."""
