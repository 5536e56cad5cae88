"""Steering DeepSeek V4: whether a prefill widens its KV first."""
