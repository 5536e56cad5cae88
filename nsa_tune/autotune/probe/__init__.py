"""`nsa-tune probe`: finds hard limits of kernels by experiment, each try in its own process."""
