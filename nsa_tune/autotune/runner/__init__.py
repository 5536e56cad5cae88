"""A run: which batches on which GPU, in which order, stored as they come."""
