"""Which way a pass takes: choosing, running it so, and watching whether the choice holds."""
