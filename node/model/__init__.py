"""The network that a peer trains: its build, loss, gradient and device. Knows no wire and no optimizer."""
