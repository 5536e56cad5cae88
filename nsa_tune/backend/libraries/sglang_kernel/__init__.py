"""sglang-kernel: FlashAttention-3 over a selection, and SGLang's top-k."""
