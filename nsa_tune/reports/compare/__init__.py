"""Two tables against each other: which arms became faster or slower, which crossovers moved."""
