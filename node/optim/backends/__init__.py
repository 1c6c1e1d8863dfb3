"""Who computes the steps of an optimizer: torch anywhere, numba on a CPU, Triton on a GPU."""
