"""Our wire, checked from outside by an independent implementation: py-libp2p against go-libp2p, in real processes."""
