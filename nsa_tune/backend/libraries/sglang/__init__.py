"""SGLang's own kernels: sparse attention in TileLang and in Triton, and sparse prefill in fp8."""
