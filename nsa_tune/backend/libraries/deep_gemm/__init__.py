"""DeepGEMM: calls and limits."""
