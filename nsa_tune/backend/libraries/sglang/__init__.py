"""SGLang's own kernels: sparse attention in Triton, and sparse prefill in fp8."""
