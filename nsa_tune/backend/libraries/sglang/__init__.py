"""SGLang's own kernels: TileLang's sparse attention, and sparse prefill in fp8."""
