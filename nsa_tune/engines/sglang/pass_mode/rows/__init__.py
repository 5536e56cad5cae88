"""A prefill by decode or verify graphs: its new tokens as the rows of these."""
