"""What SGLang copies around its attention kernels in a prefill, copied in less time.

Two copies: the prefix, read back as bf16 from an fp8 pool, and queries of few heads, padded to the
64 that FlashMLA's sparse kernel takes.
"""
