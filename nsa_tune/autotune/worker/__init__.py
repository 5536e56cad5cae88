"""Executors: each measures on one device, in a worker process that a crash may take down."""
