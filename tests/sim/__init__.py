"""The deterministic simulator: the real coordinator, peers and optimizer in one thread and virtual time, from one seed.

Fake are only the network, the clock and the disk's failures (`clock`, `network`, `world`). `faults` breaks things,
`checkers` knows what must hold; neither knows the other. `python -m tests.sim --seed N` replays a seed.
"""
