"""DeMo in numbers: gradients to votes, votes to the same update on every device. Torch and numpy only.

`layout`: the places of parameters in chunks. `exact`: transforms, and inverses in whole numbers. `votes`: selection and bytes.
`aggregate`: vote sums to a direction. `demo`: the step. `digest`: the proof that replicas are equal. `torch_optimizer`: the
step as a `torch.optim.Optimizer`. `reference`: the slow obvious version, the oracle of tests.

The package refuses to know a wire, a network, a protobuf, a clock or another peer.
"""
