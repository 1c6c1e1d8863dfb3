"""The step on a CPU in one pass over the gradients, momentum and parameters, compiled by numba.

`plan`: the places of chunks in the tensors. `emit`, `forward` and `inverse`: inner loops as vector instructions. `kernels` and
`momentum_kernels`: a range of chunks. `backend`: the calls of `choose.Backend`, and threads. `bit_codes`: votes and
indices to bytes and back. `moment`: the second moment. The portable torch path makes the same votes and parameters from the
same momentum and ballots, bit for bit. The package refuses other devices and dtypes. Other packages import only `backend`,
`bit_codes` and `moment`, and only if numba is installed.
"""
