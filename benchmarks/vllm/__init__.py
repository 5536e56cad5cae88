"""nsa-tune's plug-in measured in a real vLLM on one GPU. docs/vllm.md says how."""
