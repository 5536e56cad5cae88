"""Finding kernels' hard limits by experiment, each try in a process of its own."""
