"""Reports on what was measured: crossovers, winners, and what the engine's default costs."""
