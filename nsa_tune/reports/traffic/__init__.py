"""What traffic takes in an engine: requests simulated, passes priced, and advice from both."""
