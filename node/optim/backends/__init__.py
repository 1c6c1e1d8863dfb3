"""The programs that compute an optimizer's step: torch anywhere, numba on a CPU, Triton on a GPU."""
