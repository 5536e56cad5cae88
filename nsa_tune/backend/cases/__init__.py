"""Input tensors of each decision point's batches, and their right answers. Needs torch."""
