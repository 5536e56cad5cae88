"""What an engine calls: which table answers, the plan of a batch, and why it is so."""
