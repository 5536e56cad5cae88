"""FlashInfer: calls and limits."""
