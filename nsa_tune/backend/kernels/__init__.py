"""Triton kernels of nsa-tune, each beside its torch reference. Importing this loads nothing."""
