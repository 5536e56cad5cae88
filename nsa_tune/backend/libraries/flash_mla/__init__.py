"""FlashMLA: calls and limits."""
