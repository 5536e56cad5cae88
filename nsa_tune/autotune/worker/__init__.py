"""The process that measures, its parent, and what the two say to each other."""
