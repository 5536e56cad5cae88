"""Executors on a Ray cluster (`nsa-tune run --executor ray`). Ray places and restarts workers."""
