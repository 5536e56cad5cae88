"""The ranks of one engine: what they agree on when it starts, and what they tell each other."""
