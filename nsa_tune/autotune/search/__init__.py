"""Which batch is measured next, and when enough is known."""
