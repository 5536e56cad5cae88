"""What SGLang pays beside the kernels that tables have times of."""
