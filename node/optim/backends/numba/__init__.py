"""The step on a CPU in one pass over the gradients, momentum and parameters, compiled by numba.

`plan` (where chunks lie in the tensors), `emit`, `forward` and `inverse` (inner loops as vector instructions), `kernels`
(a range of chunks), `backend` (the calls of `backends.base`, and threads); `codec` (votes and indices to bytes
and back) and `moment`. Votes and parameters are what the portable torch path makes of the same momentum and ballots, bit
for bit. It refuses other devices and dtypes. Only `backend`, `codec` and `moment` are to be imported from outside, and
only where numba is installed.
"""
