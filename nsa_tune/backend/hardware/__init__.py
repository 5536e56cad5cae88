"""The machine: known GPUs, and what NVML says of them."""
